// Runs the threads of one block as fibers of one OS thread: stacks, switches, scheduling order, faults, deadlocks.
#include "runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// AddressSanitizer follows stack changes when it is told; without it these stay null.
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) __attribute__((weak));
void __asan_init() __attribute__((weak));
void fx_sim_switch(void** save, void* load);
}

// Saves what the calling convention wants kept, changes stacks, and leaves by a jump: the processor's return
// prediction would always be wrong here.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden fx_sim_switch
.globl fx_sim_switch
.type fx_sim_switch,@function
fx_sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size fx_sim_switch,.-fx_sim_switch
)");
static const int saved_words = 7;
static const int return_word = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.hidden fx_sim_switch
.globl fx_sim_switch
.type fx_sim_switch,%function
fx_sim_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    br x30
.size fx_sim_switch,.-fx_sim_switch
)");
static const int saved_words = 20;
static const int return_word = 1;
#else
#error "the simulated device switches fibers on x86-64 and aarch64 only"
#endif

namespace fx_sim {

__thread Thread* current __attribute__((tls_model("initial-exec")));
__thread Block* block __attribute__((tls_model("initial-exec")));
static __thread Worker* this_worker __attribute__((tls_model("initial-exec")));

static const unsigned max_threads = 1024;
static const size_t stack_bytes = 128 * 1024;  // address space; only touched pages cost memory
static const unsigned stacks_per_slab = 32;    // one guard page each: a page per stack would exhaust vm.max_map_count
static const uint64_t canary = 0x5afe57ac5afe57acULL;
static const size_t shared_capacity = 256 * 1024;
static const size_t alternate_bytes = 64 * 1024;
static unsigned never = 0;    // wait_on of a thread that has returned, with value 0
static unsigned always = 1;   // wait_on of a thread that has not started, with value 0

struct Stack {
    unsigned char* bottom;
    unsigned char* top;
    Stack* next;
};

struct SharedImage {
    void* (*anchor)();
    unsigned char* start;
    size_t bytes;
};

struct Worker {
    Block state;
    Thread* threads;  // in scheduling order
    Warp* warps;
    Launch* launch;
    Stack* stacks[max_threads];
    unsigned stack_count;   // created
    Stack* slabs[max_threads / stacks_per_slab];  // first stack of each
    void* alternate;        // signal stack that was made here, null where the thread had one
    Stack* free_stacks;
    void* main_stack_pointer;
    Stack main_stack;       // bounds, for AddressSanitizer
    unsigned unfinished;
    uint64_t random;
    unsigned char* shared_end;  // dynamic shared memory ends here, at an unreadable page
    unsigned char* shared_exact;
    unsigned shared_exact_bytes;
    SharedImage image;
    unsigned layout[4];     // block size and schedule of the prepared threads
    bool prepared;
    bool stacks_abandoned;  // a failed launch left fibers behind
    int fault;              // signal number
    void* fault_address;
    void* fault_instruction;
};

uint64_t mixed(uint64_t value) {  // splitmix64
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ value >> 27) * 0x94d049bb133111ebULL;
    return value ^ value >> 31;
}

bool address_sanitizer_present() { return __asan_init != nullptr; }

static void* mapped(size_t bytes) {
    void* result = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (result == MAP_FAILED) {
        fprintf(stderr, "fxengine simulated device: mmap of %zu bytes failed\n", bytes);
        abort();
    }
    return result;
}

static void add_stacks(Worker* w) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    unsigned char* slab = static_cast<unsigned char*>(mapped(page + stacks_per_slab * stack_bytes));
    mprotect(slab, page, PROT_NONE);
    Stack* made = static_cast<Stack*>(calloc(stacks_per_slab, sizeof(Stack)));
    w->slabs[w->stack_count / stacks_per_slab] = made;
    for (unsigned i = 0; i < stacks_per_slab && w->stack_count < max_threads; ++i) {
        Stack* s = &made[i];
        s->bottom = slab + page + i * stack_bytes;
        // Tops at different offsets: else the frames of all fibers share the same few cache sets.
        s->top = s->bottom + stack_bytes - w->stack_count * 832 % 16384;
        w->stacks[w->stack_count++] = s;
        s->next = w->free_stacks;
        w->free_stacks = s;
    }
}

static pthread_key_t at_thread_end;
static pthread_once_t key_made = PTHREAD_ONCE_INIT;

static void destroy_worker(void* data) {
    Worker* w = static_cast<Worker*>(data);
    this_worker = nullptr;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (w->alternate != nullptr) {
        stack_t off;
        memset(&off, 0, sizeof off);
        off.ss_flags = SS_DISABLE;
        sigaltstack(&off, nullptr);
        munmap(w->alternate, alternate_bytes);
    }
    for (unsigned i = 0; i < w->stack_count; i += stacks_per_slab) {
        munmap(w->stacks[i]->bottom - page, page + stacks_per_slab * stack_bytes);
        free(w->slabs[i / stacks_per_slab]);
    }
    munmap(w->shared_end - shared_capacity, shared_capacity + page);
    free(w->shared_exact);
    munmap(w->warps, max_threads / 32 * sizeof(Warp));
    munmap(w->threads, max_threads * sizeof(Thread));
    munmap(w, sizeof(Worker));
}

static void make_key() { pthread_key_create(&at_thread_end, &destroy_worker); }

Worker* worker_of_this_thread() {
    if (this_worker != nullptr) return this_worker;
    Worker* w = static_cast<Worker*>(mapped(sizeof(Worker)));
    w->threads = static_cast<Thread*>(mapped(max_threads * sizeof(Thread)));
    w->warps = static_cast<Warp*>(mapped(max_threads / 32 * sizeof(Warp)));
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    unsigned char* shared = static_cast<unsigned char*>(mapped(shared_capacity + page));
    mprotect(shared + shared_capacity, page, PROT_NONE);
    w->shared_end = shared + shared_capacity;
    stack_t alternate;  // a fault on a fiber that has no stack left needs another one
    if (sigaltstack(nullptr, &alternate) == 0 && (alternate.ss_flags & SS_DISABLE)) {
        memset(&alternate, 0, sizeof alternate);
        alternate.ss_size = alternate_bytes;
        alternate.ss_sp = w->alternate = mapped(alternate_bytes);
        sigaltstack(&alternate, nullptr);
    }
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        void* bottom = nullptr;
        size_t bytes = 0;
        pthread_attr_getstack(&attributes, &bottom, &bytes);
        pthread_attr_destroy(&attributes);
        w->main_stack.bottom = static_cast<unsigned char*>(bottom);
        w->main_stack.top = w->main_stack.bottom + bytes;
    }
    pthread_once(&key_made, &make_key);
    pthread_setspecific(at_thread_end, w);
    this_worker = w;
    return w;
}

// --- switching ---------------------------------------------------------------------------------------------------

static void change_stack(void** save, void* load, Stack* target) {
    if (__sanitizer_start_switch_fiber != nullptr) {
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, target->bottom, static_cast<size_t>(target->top - target->bottom));
        fx_sim_switch(save, load);
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
        return;
    }
    fx_sim_switch(save, load);
}

static void leave_to_main(Worker* w) __attribute__((noreturn));
static void leave_to_main(Worker* w) {
    void* abandoned;
    change_stack(&abandoned, w->main_stack_pointer, &w->main_stack);
    __builtin_unreachable();
}

static void fiber_main() __attribute__((noreturn));

static void start_fiber(Worker* w, void** save, Thread* next) {
    if (w->free_stacks == nullptr) add_stacks(w);
    Stack* s = w->free_stacks;
    w->free_stacks = s->next;
    *reinterpret_cast<uint64_t*>(s->bottom) = canary;
    next->stack = s;
    // The frame that a switch restores; its return address is fiber_main. The stack is aligned as after a call.
    void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(s->top) & ~static_cast<uintptr_t>(63)) - 8;
    frame -= saved_words + 1;
    if ((reinterpret_cast<uintptr_t>(frame + saved_words) & 15) != 8) --frame;
#if defined(__aarch64__)
    frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(frame) & ~static_cast<uintptr_t>(15));
#endif
    memset(frame, 0, saved_words * sizeof(void*));
    frame[return_word] = reinterpret_cast<void*>(&fiber_main);
    change_stack(save, frame, s);
}

// The next runnable thread after `from` in scheduling order, null when there is none. Nearly always the next one.
static Thread* pick(Worker* w, Thread* from, bool same_warp) {
    Thread* const first = w->threads;
    const unsigned count = w->state.count;
    unsigned at = static_cast<unsigned>(from - first);
    if (w->launch->settings->schedule == RANDOM) {
        w->random = mixed(w->random);
        at = static_cast<unsigned>((w->random >> 32) * count >> 32);
    } else if (same_warp) {
        const unsigned begin = at & ~31u;
        const unsigned lanes = count - begin < 32 ? count - begin : 32;
        for (unsigned i = 1; i < lanes; ++i) {
            unsigned lane = at - begin + i;
            if (lane >= lanes) lane -= lanes;
            Thread* t = first + begin + lane;
            if (*t->wait_on != t->wait_value) return t;
        }
        at = begin + lanes - 1;
    }
    for (unsigned i = 0; i < count; ++i) {
        if (++at >= count) at = 0;
        Thread* t = first + at;
        if (*t->wait_on != t->wait_value) return t;
    }
    return nullptr;
}

static void deadlock(Worker* w) __attribute__((noreturn));

extern "C" void fx_sim_wait(const unsigned* counter, unsigned value, int warp) {
    Worker* w = this_worker;
    Thread* me = current;
    me->wait_on = counter;
    me->wait_value = value;
    Thread* next = pick(w, me, warp != 0);
    if (next == nullptr) deadlock(w);
    if (next == me) return;
    current = next;
    if (next->stack == nullptr) {
        start_fiber(w, &me->stack_pointer, next);
    } else {
        change_stack(&me->stack_pointer, next->stack_pointer, next->stack);
    }
}

// What a returning thread owes the others: barriers and warp operations no longer wait for it.
static void retire(Worker* w, Thread* me) {
    me->wait_on = &never;
    me->wait_value = never;
    --w->unfinished;
    Block& b = w->state;
    if (--b.alive == b.arrived && b.arrived != 0) {
        b.arrived = 0;
        ++b.generation;
    }
    Warp& warp = b.warps[me->index >> 5];
    warp.alive &= ~(1u << (me->index & 31));
    if (warp.busy == 0) return;
    for (Slot& slot : warp.slot) {
        if (slot.arrived != 0 && slot.arrived == (slot.mask & warp.alive)) {
            slot.compute(warp, slot.arrived);
            slot.arrived = 0;
            --warp.busy;
            ++slot.generation;
        }
    }
}

static void fiber_main() {
    if (__sanitizer_finish_switch_fiber != nullptr) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
    Worker* w = this_worker;
    for (;;) {
        const Operation* operation = w->launch->operation;
        operation->kernel->invoke(operation->arguments);
        Thread* me = current;
        Stack* mine = me->stack;
        if (*reinterpret_cast<uint64_t*>(mine->bottom) != canary) {
            fx_sim_fail("stack overflow: the local variables of a thread exceed %zu bytes", stack_bytes);
        }
        retire(w, me);
        Thread* next = w->unfinished != 0 ? pick(w, me, false) : nullptr;
        if (next != nullptr && next->stack == nullptr) {
            current = next;
            next->stack = mine;
            continue;
        }
        if (next == nullptr && w->unfinished != 0) deadlock(w);
        // Nobody takes the stack before this OS thread has left it.
        mine->next = w->free_stacks;
        w->free_stacks = mine;
        if (next == nullptr) leave_to_main(w);
        current = next;
        void* abandoned;
        change_stack(&abandoned, next->stack_pointer, next->stack);
        __builtin_unreachable();
    }
}

// --- failures ----------------------------------------------------------------------------------------------------

static int describe(Worker* w, char* text, size_t bytes, const char* what) {
    const Block& b = w->state;
    const Thread* t = current;
    return snprintf(text, bytes, "%s in kernel %s, block (%u,%u,%u) thread (%u,%u,%u)", what,
                    w->launch->operation->kernel->name, b.index.x, b.index.y, b.index.z, t->position.x, t->position.y,
                    t->position.z);
}

extern "C" void fx_sim_fail(const char* format, ...) {
    Worker* w = this_worker;
    char what[768], text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    describe(w, text, sizeof text, what);
    record_failure(w->launch, 719, text);
    leave_to_main(w);
}

extern "C" void fx_sim_barrier_lines(const char* file, int line) {
    const Block& b = *block;
    fx_sim_fail("the block barrier is reached at two lines, %s:%d and %s:%d (%u of %u threads wait at the first)", b.file,
                b.line, file, line, b.arrived, b.alive);
}

extern "C" Slot* fx_sim_slot(Warp* warp, unsigned mask) {
    Slot* unused = nullptr;
    for (Slot& slot : warp->slot) {
        if (slot.arrived != 0 && slot.mask == mask) return &slot;
        if (slot.arrived == 0 && unused == nullptr) unused = &slot;
    }
    if (unused == nullptr) fx_sim_fail("more than 8 warp operations of one warp wait, each with another mask");
    return unused;
}

static void deadlock(Worker* w) {
    struct Site {
        const char *what, *file;
        int line;
        unsigned threads;
        uint3 first;
    } sites[6];
    unsigned used = 0;
    for (unsigned i = 0; i < w->state.count; ++i) {
        const Thread& t = w->threads[i];
        if (t.wait_on == &never) continue;
        unsigned s = 0;
        while (s < used && (sites[s].line != t.line || sites[s].file != t.file || sites[s].what != t.what)) ++s;
        if (s == used) {
            if (used == 6) continue;
            sites[used++] = {t.what, t.file, t.line, 0, t.position};
        }
        ++sites[s].threads;
    }
    char text[1024];
    const Block& b = w->state;
    int at = snprintf(text, sizeof text, "deadlock in kernel %s, block (%u,%u,%u): %u of %u threads have not returned",
                      w->launch->operation->kernel->name, b.index.x, b.index.y, b.index.z, w->unfinished, b.count);
    for (unsigned s = 0; s < used && at < static_cast<int>(sizeof text); ++s) {
        at += snprintf(text + at, sizeof text - static_cast<size_t>(at), "%s %u, first (%u,%u,%u), wait at %s, %s:%d",
                       s == 0 ? ":" : ";", sites[s].threads, sites[s].first.x, sites[s].first.y, sites[s].first.z,
                       sites[s].what, sites[s].file, sites[s].line);
    }
    record_failure(w->launch, 719, text);
    leave_to_main(w);
}

static const int fault_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
static struct sigaction previous_action[64];

static void on_fault(int number, siginfo_t* info, void* context) {
    Worker* w = this_worker;
    if (w != nullptr && w->launch != nullptr && w->fault == 0) {
        w->fault = number;
        w->fault_address = info->si_addr;
        ucontext_t* machine = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
        w->fault_instruction = reinterpret_cast<void*>(machine->uc_mcontext.gregs[16]);  // REG_RIP
#else
        w->fault_instruction = reinterpret_cast<void*>(machine->uc_mcontext.pc);
#endif
        leave_to_main(w);
    }
    const struct sigaction& before = previous_action[number];
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL) {
        signal(number, SIG_DFL);  // returning repeats the fault, which now ends the process
    } else if (before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    }
}

void install_fault_handlers() {
    struct sigaction now;
    // Others (faulthandler) may have installed theirs since: ours must come first while kernels run.
    if (sigaction(SIGSEGV, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault) return;
    for (int number : fault_signals) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = &on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler does not return: nothing may stay masked
        sigemptyset(&action.sa_mask);
        struct sigaction before;
        if (sigaction(number, nullptr, &before) != 0) continue;
        if ((before.sa_flags & SA_SIGINFO) && before.sa_sigaction == &on_fault) continue;
        previous_action[number] = before;
        sigaction(number, &action, nullptr);
    }
}

static void report_fault(Worker* w) {
    char what[256], text[1024];
    unsigned char* at = static_cast<unsigned char*>(w->fault_address);
    bool overflow = false;
    for (unsigned i = 0; i < w->stack_count; i += stacks_per_slab) {
        const unsigned char* bottom = w->stacks[i]->bottom;
        overflow |= at < bottom && at >= bottom - sysconf(_SC_PAGESIZE);
    }
    int code = 700;
    if (w->fault == SIGILL || w->fault == SIGTRAP) {
        snprintf(what, sizeof what, "an index is outside its array (bounds trap)");
    } else if (w->fault == SIGFPE) {
        code = 719;
        snprintf(what, sizeof what, "integer division by zero");
    } else if (overflow) {
        code = 719;
        snprintf(what, sizeof what, "stack overflow: the local variables of a thread exceed %zu bytes", stack_bytes);
    } else if (at >= w->shared_end && at < w->shared_end + sysconf(_SC_PAGESIZE)) {
        snprintf(what, sizeof what, "access %zu bytes past the end of %u bytes of dynamic shared memory",
                 static_cast<size_t>(at - w->shared_end), w->launch->operation->dynamic_shared);
    } else {
        snprintf(what, sizeof what, "illegal address %p", w->fault_address);
    }
    describe(w, text, sizeof text, what);
    Launch* launch = w->launch;
    record_failure(launch, code, text);
    Dl_info module;
    if (launch->failure->instruction == 0 && dladdr(w->fault_instruction, &module) != 0 && module.dli_fname != nullptr) {
        launch->failure->instruction = static_cast<uint64_t>(static_cast<char*>(w->fault_instruction) -
                                                             static_cast<char*>(module.dli_fbase));
        snprintf(launch->failure->module, sizeof launch->failure->module, "%s", module.dli_fname);
    }
}

// --- shared memory -----------------------------------------------------------------------------------------------

struct ImageQuery {
    uintptr_t anchor;
    SharedImage* image;
};

static int find_image(struct dl_phdr_info* info, size_t, void* data) {
    ImageQuery* query = static_cast<ImageQuery*>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type != PT_TLS || info->dlpi_tls_data == nullptr) continue;
        const uintptr_t start = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
        if (query->anchor >= start && query->anchor < start + info->dlpi_phdr[i].p_memsz) {
            query->image->start = static_cast<unsigned char*>(info->dlpi_tls_data);
            query->image->bytes = info->dlpi_phdr[i].p_memsz;
            return 1;
        }
    }
    return 0;
}

static void poison_shared(Worker* w, const Operation* operation, int value) {
    void* (*anchor)() = operation->kernel->shared_anchor;
    if (anchor != nullptr) {
        if (w->image.anchor != anchor) {
            w->image = {anchor, nullptr, 0};
            ImageQuery query = {reinterpret_cast<uintptr_t>(anchor()), &w->image};
            dl_iterate_phdr(&find_image, &query);
        }
        memset(w->image.start, value, w->image.bytes);
    }
    memset(w->state.dynamic_shared, value, operation->dynamic_shared);
}

static unsigned char* dynamic_shared(Worker* w, unsigned bytes) {
    if (!address_sanitizer_present()) return w->shared_end - (bytes + 15) / 16 * 16;
    if (w->shared_exact == nullptr || w->shared_exact_bytes != bytes) {  // exact size: red zones begin right behind
        free(w->shared_exact);
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, bytes != 0 ? bytes : 1) != 0) abort();
        w->shared_exact = static_cast<unsigned char*>(memory);
        w->shared_exact_bytes = bytes;
    }
    return w->shared_exact;
}

// --- one block ---------------------------------------------------------------------------------------------------

static void place_threads(Worker* w, const Launch* launch, uint64_t block_index) {
    const Block& b = w->state;
    const int schedule = launch->settings->schedule;
    const unsigned layout[4] = {b.size.x, b.size.y, b.size.z, static_cast<unsigned>(schedule)};
    if (w->prepared && schedule != RANDOM && memcmp(layout, w->layout, sizeof layout) == 0) return;
    unsigned order[max_threads];
    for (unsigned i = 0; i < b.count; ++i) order[i] = schedule == REVERSE ? b.count - 1 - i : i;
    if (schedule == RANDOM) {
        w->random = mixed(launch->settings->seed ^ mixed(block_index));
        for (unsigned i = b.count - 1; i > 0; --i) {
            w->random = mixed(w->random);
            const unsigned j = static_cast<unsigned>(w->random % (i + 1));
            const unsigned swapped = order[i];
            order[i] = order[j];
            order[j] = swapped;
        }
    }
    for (unsigned i = 0; i < b.count; ++i) {
        Thread& t = w->threads[i];
        const unsigned index = order[i];
        t.index = index;
        t.position = {index % b.size.x, index / b.size.x % b.size.y, index / b.size.x / b.size.y};
    }
    memcpy(w->layout, layout, sizeof layout);
    w->prepared = true;
}

bool run_block(Worker* w, Launch* launch, uint64_t block_index) {
    const Operation* operation = launch->operation;
    Block& b = w->state;
    const unsigned* grid = operation->grid;
    b.index = {static_cast<unsigned>(block_index % grid[0]), static_cast<unsigned>(block_index / grid[0] % grid[1]),
               static_cast<unsigned>(block_index / grid[0] / grid[1])};
    b.grid = {grid[0], grid[1], grid[2]};
    b.size = {operation->size[0], operation->size[1], operation->size[2]};
    b.count = b.size.x * b.size.y * b.size.z;
    b.alive = w->unfinished = b.count;
    b.arrived = 0;
    b.warps = w->warps;
    b.dynamic_shared = dynamic_shared(w, operation->dynamic_shared);
    place_threads(w, launch, block_index);
    for (unsigned i = 0; i < b.count; ++i) {
        Thread& t = w->threads[i];
        t.wait_on = &always;
        t.wait_value = 0;
        t.stack = nullptr;
    }
    for (unsigned first = 0; first < b.count; first += 32) {
        Warp& warp = w->warps[first / 32];
        warp.alive = b.count - first >= 32 ? 0xffffffffu : (1u << (b.count - first)) - 1u;
        if (warp.busy != 0) {  // left by a failed launch
            for (Slot& slot : warp.slot) slot.arrived = 0;
            warp.busy = 0;
        }
    }
    if (launch->settings->poison >= 0) poison_shared(w, operation, launch->settings->poison);
    if (w->stacks_abandoned) {
        w->free_stacks = nullptr;
        for (unsigned i = w->stack_count; i-- > 0;) {
            w->stacks[i]->next = w->free_stacks;
            w->free_stacks = w->stacks[i];
        }
    }
    w->stacks_abandoned = true;  // until the block has come to its end
    block = &b;
    w->launch = launch;
    w->fault = 0;
    Thread* first = launch->settings->schedule == RANDOM ? pick(w, w->threads, false) : w->threads;
    current = first;
    start_fiber(w, &w->main_stack_pointer, first);
    if (w->fault != 0) report_fault(w);
    if (w->fault == 0 && w->unfinished == 0) w->stacks_abandoned = false;
    w->launch = nullptr;
    return launch->failed == 0;
}

}  // namespace fx_sim

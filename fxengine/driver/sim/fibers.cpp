// Stacks and the switch between them; making and ending the workers.
#include "worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" void __asan_init() __attribute__((weak));

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
__thread Worker* this_worker __attribute__((tls_model("initial-exec")));

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
    free_copies(w);
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
    make_copies(w);
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

void leave_to_main(Worker* w) {
    void* abandoned;
    change_stack(&abandoned, w->main_stack_pointer, &w->main_stack);
    __builtin_unreachable();
}

void start_fiber(Worker* w, void** save, Thread* next) {
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

}  // namespace fx_sim

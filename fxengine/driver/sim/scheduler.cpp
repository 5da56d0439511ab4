// Runs one block: the order in which its threads run, what they wait for, their shared memory.
#include "worker.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

namespace fx_sim {

unsigned never = 0;
unsigned always = 1;

uint64_t mixed(uint64_t value) {  // splitmix64
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ value >> 27) * 0x94d049bb133111ebULL;
    return value ^ value >> 31;
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
    check_copies(w, me->index);
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

void fiber_main() {
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
    forget_copies(w);
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

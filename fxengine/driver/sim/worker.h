// The state of an OS thread that runs blocks, and the switch between its fibers. Private to the runtime.
#pragma once

#include "runtime.h"

// AddressSanitizer follows stack changes when it is told; without it these stay null.
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) __attribute__((weak));
// Saves this stack's pointer and registers, and continues where `load` was saved.
void fx_sim_switch(void** save, void* load);
}

namespace fx_sim {

constexpr unsigned max_threads = 1024;
constexpr size_t stack_bytes = 128 * 1024;  // address space; only touched pages cost memory
constexpr unsigned stacks_per_slab = 32;    // one guard page each: a page per stack would exhaust vm.max_map_count
constexpr uint64_t canary = 0x5afe57ac5afe57acULL;
constexpr size_t shared_capacity = 256 * 1024;
constexpr size_t alternate_bytes = 64 * 1024;
extern unsigned never;   // 0; what a thread that has returned waits on, with value 0
extern unsigned always;  // 1; what a thread that has not started waits on, with value 0

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

struct Copies;

struct Worker {
    Block state;
    Thread* threads;  // in scheduling order
    Warp* warps;
    Copies* copies;   // by thread index
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

extern __thread Worker* this_worker __attribute__((tls_model("initial-exec")));

// A stack whose frame starts fiber_main when it is switched to, given to `next`; then switches there.
void start_fiber(Worker* w, void** save, Thread* next);
void fiber_main() __attribute__((noreturn));
// From a fiber, or from a signal handler, back to run_block. Fibers that have not ended are abandoned.
void leave_to_main(Worker* w) __attribute__((noreturn));
void deadlock(Worker* w) __attribute__((noreturn));
// Turns the fault that ended a block into the launch's failure.
void report_fault(Worker* w);

// Asynchronous copies: of a new worker, before a block, when a thread returns, at the worker's end.
void make_copies(Worker* w);
void forget_copies(Worker* w);
void check_copies(Worker* w, unsigned thread);
void free_copies(Worker* w);

inline void change_stack(void** save, void* load, Stack* target) {
    if (__sanitizer_start_switch_fiber != nullptr) {
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, target->bottom, static_cast<size_t>(target->top - target->bottom));
        fx_sim_switch(save, load);
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
        return;
    }
    fx_sim_switch(save, load);
}

}  // namespace fx_sim

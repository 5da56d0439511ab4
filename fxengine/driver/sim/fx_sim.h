// What kernels and runtime of the simulated device share: the records of a CUDA thread, warp and block, and the one
// primitive under every barrier and warp operation.
//
// A block runs on one OS thread. Its CUDA threads run one after another on a fiber; a thread that blocks lets the
// next one start on a fresh fiber, a thread that returns hands its stack on. Kernels without barriers are thus plain
// loops. A blocked thread waits for a generation counter to change, so a barrier releases all by one increment.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FX_SIM_INLINE inline __attribute__((always_inline))
#define FX_SIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace fx_sim {

struct Stack;

// One cache line per CUDA thread: all that a switch touches.
struct alignas(64) Thread {
    uint3 position;           // threadIdx
    unsigned index;           // linear index in the block
    const unsigned* wait_on;  // runnable when *wait_on != wait_value
    unsigned wait_value;
    int line;  // where it waits, for deadlock reports
    void* stack_pointer;  // null: not started
    const char* file;
    const char* what;
    Stack* stack;
};
static_assert(sizeof(Thread) == 64, "one cache line");

struct Warp;
typedef void (*WarpCompute)(Warp& warp, unsigned lanes);

// A warp operation under way, found by its mask: diverged parts of a warp wait in different slots.
struct Slot {
    unsigned mask, arrived, generation;
    int line;
    const char* file;
    const char* what;
    WarpCompute compute;
};

struct Warp {
    unsigned alive;      // lanes that have not returned
    unsigned busy;       // slots in use
    void* operand[32];   // per lane: its operands, on its own stack
    Slot slot[8];
};

struct Block {
    uint3 index, size, grid;
    unsigned count;       // threads
    unsigned alive;       // threads that have not returned
    unsigned arrived;     // at the block barrier
    unsigned generation;  // of the block barrier
    int line;             // of the barrier
    const char* file;
    int sum[2], any[2], all[2];  // __syncthreads_count/_or/_and, by parity of the generation
    Warp* warps;
    unsigned char* dynamic_shared;
};

// One kernel of a module, exported by FX_SIM_EXPORT.
struct Kernel {
    const char* name;
    void (*invoke)(void* const* arguments);  // one CUDA thread
    const unsigned* sizes;                   // of the arguments
    const unsigned* offsets;                 // in the parameter block
    unsigned arguments;
    unsigned max_threads;                    // __launch_bounds__; 0: none
    void* (*shared_anchor)();                // makes this OS thread's static __shared__ exist; null: not thread-local
};

// initial-exec: one load instead of a call. The runtime is loaded first and for all, so the slots are its own.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));
extern __thread Block* block __attribute__((tls_model("initial-exec")));

extern "C" {
// Blocks the current thread; warp: prefer lanes of its warp next.
void fx_sim_wait(const unsigned* counter, unsigned value, int warp);
// Ends the launch with an error. Never returns: it leaves the fiber.
void fx_sim_fail(const char* format, ...) __attribute__((noreturn, format(printf, 1, 2)));
Slot* fx_sim_slot(Warp* warp, unsigned mask);
// Asynchronous copies to shared memory of up to 16 bytes; see fx_copy_quad and its like.
void fx_sim_copy(void* to, const void* data, unsigned bytes);
void fx_sim_copy_commit();
void fx_sim_copy_wait(unsigned newest);
void fx_sim_barrier_lines(const char* file, int line) __attribute__((noreturn));
}

FX_SIM_INLINE void wait(const unsigned* counter, const char* what, const char* file, int line, int warp) {
    Thread* me = current;
    me->what = what;
    me->file = file;
    me->line = line;
    fx_sim_wait(counter, *counter, warp);
}

// Block barrier; returns the parity under which the reductions of this barrier were collected.
FX_SIM_INLINE unsigned barrier(int predicate, const char* what, const char* file, int line) {
    Block& b = *block;
    const unsigned parity = b.generation & 1u;
    if (b.arrived == 0) {
        b.file = file;
        b.line = line;
        b.sum[parity] = b.any[parity] = 0;
        b.all[parity] = 1;
    } else if (b.line != line || b.file != file) {
        fx_sim_barrier_lines(file, line);
    }
    b.sum[parity] += predicate != 0;
    b.any[parity] |= predicate != 0;
    b.all[parity] &= predicate != 0;
    if (++b.arrived == b.alive) {
        b.arrived = 0;
        ++b.generation;
    } else {
        wait(&b.generation, what, file, line, 0);
    }
    return parity;
}

// Every lane of the mask parks a pointer to its operands; the last one computes for all.
FX_SIM_INLINE void collective(unsigned mask, void* operand, WarpCompute compute, const char* what, const char* file,
                              int line) {
    const unsigned lane = current->index & 31u;
    Warp& warp = block->warps[current->index >> 5];
    if (!(mask >> lane & 1u)) fx_sim_fail("%s at %s:%d: lane %u is not in its own mask 0x%08x", what, file, line, lane, mask);
    warp.operand[lane] = operand;
    Slot* slot = &warp.slot[0];
    if (warp.busy != 0 && (slot->arrived == 0 || slot->mask != mask)) slot = fx_sim_slot(&warp, mask);
    if (slot->arrived == 0) {
        slot->mask = mask;
        slot->compute = compute;
        slot->what = what;
        slot->file = file;
        slot->line = line;
        ++warp.busy;
    } else if (slot->compute != compute) {
        fx_sim_fail("lanes of mask 0x%08x call different warp operations: %s at %s:%d and %s at %s:%d", mask, slot->what,
                    slot->file, slot->line, what, file, line);
    }
    slot->arrived |= 1u << lane;
    if (slot->arrived == (mask & warp.alive)) {
        compute(warp, slot->arrived);
        slot->arrived = 0;
        --warp.busy;
        ++slot->generation;
    } else {
        wait(&slot->generation, what, file, line, 1);
    }
}

}  // namespace fx_sim

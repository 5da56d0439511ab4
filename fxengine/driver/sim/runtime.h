// Private to the runtime of the simulated device: what its two source files share.
#pragma once

#include "fx_sim.h"

namespace fx_sim {

enum Schedule { GREEDY = 0, REVERSE = 1, RANDOM = 2 };

// What Python sees of a failed launch (ctypes mirror: Failure in runtime.py).
struct Failure {
    int code;               // CUresult: 700 illegal address, 719 launch failed
    int operation;          // index in the list that ran
    uint64_t instruction;   // of a fault, relative to its module; 0: unknown
    char module[512];       // path of the shared object that holds it
    char text[1024];
};

// One kernel launch; also copies and fills, which are kernels of the runtime (ctypes mirror: Operation).
struct Operation {
    const Kernel* kernel;
    void* const* arguments;
    unsigned grid[3], size[3];
    unsigned dynamic_shared;
    unsigned reserved;
};

struct Settings {
    int schedule;
    int poison;  // 0..255: fills __shared__ memory before every block; negative: off
    uint64_t seed;
};

struct Launch {
    const Operation* operation;
    const Settings* settings;
    Failure* failure;
    uint64_t blocks;
    uint64_t stride, offset;  // the order of the blocks: index * stride + offset, modulo blocks
    volatile uint64_t next;   // block index to take, by atomic increment
    volatile int failed;
};

struct Worker;
Worker* worker_of_this_thread();
// Runs one block; false when the launch has failed.
bool run_block(Worker* worker, Launch* launch, uint64_t block_index);
void install_fault_handlers();
void record_failure(Launch* launch, int code, const char* text);
bool address_sanitizer_present();
uint64_t mixed(uint64_t value);

}  // namespace fx_sim

// The pool of OS threads that runs the blocks of a launch, and the C interface that Python calls.
#include "runtime.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

namespace fx_sim {

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;  // one list of operations at a time
static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_ready = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;
static Launch* pool_launch;
static unsigned pool_threads;   // started
static unsigned pool_wanted;    // helpers the current launch still asks for
static unsigned pool_active;    // helpers at work
static unsigned worker_limit = 1;
static Settings settings = {GREEDY, -1, 0};
static const long helpers_worthwhile_ns = 20000;

void record_failure(Launch* launch, int code, const char* text) {
    pthread_mutex_lock(&failure_lock);
    if (launch->failed == 0) {  // the first one is the cause
        launch->failure->code = code;
        launch->failure->instruction = 0;
        launch->failure->module[0] = 0;
        snprintf(launch->failure->text, sizeof launch->failure->text, "%s", text);
        launch->failed = 1;
    }
    pthread_mutex_unlock(&failure_lock);
}

static bool run_next_block(Worker* worker, Launch* launch) {
    const uint64_t taken = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED);
    if (taken >= launch->blocks || launch->failed != 0) return false;
    return run_block(worker, launch, (taken * launch->stride + launch->offset) % launch->blocks);
}

static void* pool_main(void*) {
    Worker* worker = worker_of_this_thread();
    pthread_mutex_lock(&pool_lock);
    for (;;) {
        while (pool_launch == nullptr || pool_wanted == 0) pthread_cond_wait(&work_ready, &pool_lock);
        Launch* launch = pool_launch;
        --pool_wanted;
        ++pool_active;
        pthread_mutex_unlock(&pool_lock);
        while (run_next_block(worker, launch)) {
        }
        pthread_mutex_lock(&pool_lock);
        if (--pool_active == 0) pthread_cond_signal(&work_done);
    }
    return nullptr;
}

static void ask_for_helpers(Launch* launch) {
    const uint64_t left = launch->blocks - (launch->next < launch->blocks ? launch->next : launch->blocks);
    unsigned helpers = worker_limit - 1;
    if (left < helpers) helpers = static_cast<unsigned>(left);
    if (helpers == 0) return;
    pthread_mutex_lock(&pool_lock);
    sigset_t all, before;  // signals meant for the process go to its own threads
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGTRAP);
    sigdelset(&all, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool_threads < helpers) {
        pthread_t made;
        if (pthread_create(&made, nullptr, &pool_main, nullptr) != 0) break;
        pthread_detach(made);
        ++pool_threads;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pool_launch = launch;
    pool_wanted = helpers < pool_threads ? helpers : pool_threads;
    pthread_cond_broadcast(&work_ready);
    pthread_mutex_unlock(&pool_lock);
}

static void wait_for_helpers() {
    pthread_mutex_lock(&pool_lock);
    pool_launch = nullptr;
    pool_wanted = 0;
    while (pool_active != 0) pthread_cond_wait(&work_done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
}

static uint64_t common_divisor(uint64_t a, uint64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

static void order_blocks(Launch* launch) {
    launch->stride = 1;
    launch->offset = 0;
    if (launch->blocks > 0xffffffffu) return;  // the product would not fit
    if (settings.schedule == REVERSE) {
        launch->stride = launch->blocks - 1 != 0 ? launch->blocks - 1 : 1;  // -1, modulo blocks
        launch->offset = launch->blocks - 1;
    } else if (settings.schedule == RANDOM) {
        launch->offset = mixed(settings.seed) % launch->blocks;
        launch->stride = mixed(settings.seed + 1) % launch->blocks;
        while (launch->stride == 0 || common_divisor(launch->stride, launch->blocks) != 1) ++launch->stride;
    }
}

static bool run_operation(Worker* worker, const Operation* operation, Failure* failure) {
    Launch launch;
    launch.operation = operation;
    launch.settings = &settings;
    launch.failure = failure;
    launch.blocks = static_cast<uint64_t>(operation->grid[0]) * operation->grid[1] * operation->grid[2];
    launch.next = 0;
    launch.failed = 0;
    order_blocks(&launch);
    if (launch.blocks == 1 || worker_limit == 1) {
        while (run_next_block(worker, &launch)) {
        }
        return launch.failed == 0;
    }
    // The first block tells whether waking others pays.
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (run_next_block(worker, &launch)) {
        clock_gettime(CLOCK_MONOTONIC, &end);
        const long one = (end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec;
        const bool helped = static_cast<double>(one) * static_cast<double>(launch.blocks - 1) > helpers_worthwhile_ns;
        if (helped) ask_for_helpers(&launch);
        while (run_next_block(worker, &launch)) {
        }
        if (helped) wait_for_helpers();
    }
    return launch.failed == 0;
}

static void in_child() {  // the pool's threads did not survive the fork
    pthread_mutex_init(&launch_lock, nullptr);
    pthread_mutex_init(&failure_lock, nullptr);
    pthread_mutex_init(&pool_lock, nullptr);
    pthread_cond_init(&work_ready, nullptr);
    pthread_cond_init(&work_done, nullptr);
    pool_launch = nullptr;
    pool_threads = pool_wanted = pool_active = 0;
}

// Copies and fills are kernels of one thread: a bad address in them ends like one in any kernel.
static void fill32(void* const* arguments) {
    unsigned* to = *static_cast<unsigned* const*>(arguments[0]);
    const unsigned value = *static_cast<const unsigned*>(arguments[1]);
    const uint64_t count = *static_cast<const uint64_t*>(arguments[2]);
    if (value == (value & 0xffu) * 0x01010101u) {
        memset(to, static_cast<int>(value & 0xffu), count * 4);
    } else {
        for (uint64_t i = 0; i < count; ++i) to[i] = value;
    }
}

static void copy(void* const* arguments) {
    memmove(*static_cast<void* const*>(arguments[0]), *static_cast<const void* const*>(arguments[1]),
            *static_cast<const uint64_t*>(arguments[2]));
}

static const unsigned fill_sizes[] = {8, 4, 8, 0}, fill_offsets[] = {0, 8, 16, 0};
static const unsigned copy_sizes[] = {8, 8, 8, 0}, copy_offsets[] = {0, 8, 16, 0};

}  // namespace fx_sim

using namespace fx_sim;

extern "C" {

extern const Kernel fx_sim_memset, fx_sim_memcpy;
const Kernel fx_sim_memset = {"memset", &fill32, fill_sizes, fill_offsets, 3, 1, nullptr};
const Kernel fx_sim_memcpy = {"memcpy", &copy, copy_sizes, copy_offsets, 3, 1, nullptr};

// Before anything else, and again to change the number of workers, which counts the calling thread.
void fx_sim_start(unsigned workers) {
    static bool forked = false;
    pthread_mutex_lock(&launch_lock);
    if (!forked) pthread_atfork(nullptr, nullptr, &in_child);
    forked = true;
    // Under AddressSanitizer __shared__ is one plain static per variable.
    worker_limit = workers == 0 || address_sanitizer_present() ? 1 : workers;
    pthread_mutex_unlock(&launch_lock);
}

int fx_sim_sanitized() { return address_sanitizer_present() ? 1 : 0; }

// Runs the operations in order; 0, or -1 with `failure` filled.
int fx_sim_run(const Operation* operations, int count, int schedule, uint64_t seed, int poison, Failure* failure) {
    pthread_mutex_lock(&launch_lock);
    settings.schedule = schedule;
    settings.seed = seed;
    settings.poison = poison;
    install_fault_handlers();
    Worker* worker = worker_of_this_thread();
    int result = 0;
    for (int i = 0; i < count; ++i) {
        if (!run_operation(worker, &operations[i], failure)) {
            failure->operation = i;
            result = -1;
            break;
        }
    }
    pthread_mutex_unlock(&launch_lock);
    return result;
}

}  // extern "C"

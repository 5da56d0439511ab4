// How launches fail: what kernels do wrong, deadlocks, processor faults.
#include "worker.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

namespace fx_sim {

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

void deadlock(Worker* w) {
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

void report_fault(Worker* w) {
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

}  // namespace fx_sim

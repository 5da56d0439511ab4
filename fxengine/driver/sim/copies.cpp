// Copies to shared memory that go on beside their thread. They are made as late as the kernel allows, when the thread
// waits for their group: a kernel that reads too early, or counts its groups wrong, finds what was there before.
#include "worker.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace fx_sim {

struct Copy {
    void* to;
    unsigned bytes;
    unsigned group;
    unsigned char data[16];
};

struct Copies {  // of a CUDA thread
    Copy* item;
    unsigned count, room;
    unsigned groups;  // closed
};

static Copies& own_copies() { return this_worker->copies[current->index]; }

extern "C" void fx_sim_copy(void* to, const void* data, unsigned bytes) {
    Copies& own = own_copies();
    if (own.count == own.room) {
        own.room = own.room == 0 ? 16 : 2 * own.room;
        own.item = static_cast<Copy*>(realloc(own.item, own.room * sizeof(Copy)));
        if (own.item == nullptr) abort();
    }
    Copy& copy = own.item[own.count++];
    copy = {to, bytes, own.groups, {}};
    memcpy(copy.data, data, bytes);
}

extern "C" void fx_sim_copy_commit() { ++own_copies().groups; }

extern "C" void fx_sim_copy_wait(unsigned newest) {
    Copies& own = own_copies();
    unsigned kept = 0;
    for (unsigned i = 0; i < own.count; ++i) {
        const Copy& copy = own.item[i];
        if (copy.group + newest < own.groups) {
            memcpy(copy.to, copy.data, copy.bytes);
        } else {
            own.item[kept++] = copy;
        }
    }
    own.count = kept;
}

void make_copies(Worker* w) {
    void* memory = mmap(nullptr, max_threads * sizeof(Copies), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    w->copies = static_cast<Copies*>(memory);
}

void forget_copies(Worker* w) {
    for (unsigned i = 0; i < w->state.count; ++i) w->copies[i].count = w->copies[i].groups = 0;
}

void free_copies(Worker* w) {
    for (unsigned i = 0; i < max_threads; ++i) free(w->copies[i].item);
    munmap(w->copies, max_threads * sizeof(Copies));
}

void check_copies(Worker* w, unsigned thread) {
    const unsigned count = w->copies[thread].count;
    if (count != 0) fx_sim_fail("the thread returns while %u of its asynchronous copies are under way", count);
}

}  // namespace fx_sim

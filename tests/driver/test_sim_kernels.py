"""CUDA's words on the simulated device: indices, barriers, warp operations, atomics, shared memory, mathematics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.driver.test_sim_support import SCHEDULES, Result, Sim, make_sim

TEXT = r"""
typedef unsigned long long u64;

extern "C" __global__ void indices(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * 10000 + thread;
}

template <class T> __device__ void shuffles(T* out, T value) {
    const int t = threadIdx.x, n = blockDim.x;
    out[t] = __shfl_sync(0xffffffffu, value, t * 7 + 3, 16);
    out[n + t] = __shfl_up_sync(0xffffffffu, value, 5, 16);
    out[2 * n + t] = __shfl_down_sync(0xffffffffu, value, 3);
    out[3 * n + t] = __shfl_xor_sync(0xffffffffu, value, 9);
}
extern "C" __global__ void shuffle_int(int* out) { shuffles<int>(out, threadIdx.x * 3); }
extern "C" __global__ void shuffle_unsigned(unsigned* out) { shuffles<unsigned>(out, threadIdx.x * 3u); }
extern "C" __global__ void shuffle_float(float* out) { shuffles<float>(out, threadIdx.x * 3.0f); }
extern "C" __global__ void shuffle_double(double* out) { shuffles<double>(out, threadIdx.x * 3.0); }
extern "C" __global__ void shuffle_long(long long* out) { shuffles<long long>(out, threadIdx.x * 3ll); }
extern "C" __global__ void shuffle_u64(u64* out) { shuffles<u64>(out, threadIdx.x * 3ull); }

extern "C" __global__ void votes(unsigned* out) {
    const unsigned all = 0xffffffffu;
    const int t = threadIdx.x, n = blockDim.x;
    unsigned* mine = out + t;
    mine[0 * n] = __ballot_sync(all, t % 3 == 0);
    mine[1 * n] = __any_sync(all, t == 40);
    mine[2 * n] = __all_sync(all, t < 32);
    mine[3 * n] = __reduce_add_sync(all, (unsigned)t);
    mine[4 * n] = __reduce_max_sync(all, -t) + 100;
    mine[5 * n] = __reduce_min_sync(all, (unsigned)t);
    mine[6 * n] = __reduce_or_sync(all, 1u << (t & 7));
    mine[7 * n] = __reduce_and_sync(all, ~(1u << (t & 7)));
    mine[8 * n] = __reduce_xor_sync(all, (unsigned)t);
    mine[9 * n] = __match_any_sync(all, t % 4);
    mine[10 * n] = __syncthreads_count(t % 5 == 0);
    mine[11 * n] = __syncthreads_or(t == 3);
    mine[12 * n] = __syncthreads_and(t < 1000);
    mine[13 * n] = __syncthreads_and(t != 1);
}

// Two halves of a warp do different things, each under its own mask, then meet.
extern "C" __global__ void diverged(int* out) {
    const int lane = threadIdx.x & 31;
    int sum = 0;
    if (lane < 16) {
        for (int i = 0; i < 3; ++i) sum += __shfl_xor_sync(0x0000ffffu, lane + i, 1);
    } else {
        sum = __reduce_add_sync(0xffff0000u, 1);
        __syncwarp(0xffff0000u);
    }
    __syncwarp();
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum + 100 * __shfl_sync(0xffffffffu, sum, 31);
}

// Threads that have returned hold up neither barriers nor full masks.
extern "C" __global__ void early_return(int* out, int n) {
    __shared__ int total[4];
    const int t = threadIdx.x;
    if (t < 4) total[t] = 0;
    __syncthreads();
    if (t >= n) return;
    atomicAdd(&total[t / 32], 1);
    __syncthreads();
    out[t] = total[t / 32] + 1000 * __reduce_add_sync(0xffffffffu, 1);
}

template <class T, int N> __device__ T block_sum(T value) {
    __shared__ T parts[N];
    for (int d = 16; d > 0; d /= 2) value += __shfl_down_sync(0xffffffffu, value, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    T total = 0;
    for (int i = 0; i < N; ++i) total += parts[i];
    __syncthreads();
    return total;
}
extern "C" __global__ void __launch_bounds__(256) sums(float* f, double* d) {
    const float a = block_sum<float, 8>(threadIdx.x * 0.25f);
    const float b = block_sum<float, 8>(a);
    const double c = block_sum<double, 8>(b + threadIdx.x);
    if (threadIdx.x == 0) { f[blockIdx.x] = b; d[blockIdx.x] = c; }
}

extern "C" __global__ void atomics(int* i, unsigned* u, u64* w) {
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&i[0], id);
    atomicMax(&i[1], id);
    atomicMin(&i[2], -id);
    atomicSub(&i[3], 1);
    atomicAdd(&u[0], 1u);
    atomicOr(&u[1], 1u << (id % 32));
    atomicAnd(&u[2], ~(1u << (id % 32)));
    atomicXor(&u[3], 1u << (id % 32));
    atomicAdd(&w[0], 1ull << 33);
    atomicMax(&w[1], (u64)id << 32);
    for (u64 seen = w[2];;) {  // an addition by compare-and-swap
        const u64 now = atomicCAS(&w[2], seen, seen + 3);
        if (now == seen) break;
        seen = now;
    }
    if (atomicExch(&u[4], 1u) == 0) atomicAdd(&u[5], 1u);
}

// The last block to finish adds up what all wrote.
extern "C" __global__ void ticket(const float* x, float* parts, unsigned* counter, float* out) {
    __shared__ int last;
    const float sum = block_sum<float, 2>(x[blockIdx.x * 64 + threadIdx.x]);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    float total = 0.0f;
    for (int i = 0; i < (int)gridDim.x; ++i) total += parts[i];
    *out = total;
    *counter = 0;
}

extern "C" __global__ void dynamic(float* out, int n) {
    FX_DYN_SHARED(float, buffer);
    for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = buffer[n - 1 - i];
}

struct Pair { char c; double d; };
extern "C" __global__ void parameters(char a, double b, short c, Pair p, int* out, float4 v) {
    out[0] = a; out[1] = (int)b; out[2] = c; out[3] = p.c; out[4] = (int)p.d; out[5] = (int)(v.x + v.w);
}

extern "C" __global__ void bits(unsigned* out, u64* wide, float* f) {
    out[0] = __float_as_uint(1.0f);
    out[1] = __float_as_int(__uint_as_float(0x7fc00000u)) == 0x7fc00000;
    out[2] = __umulhi(0xD2511F53u, 0x12345678u);
    out[3] = __popc(0xf0f0u);
    out[4] = __clz(1);
    out[5] = __clz(0);
    out[6] = __ffs(8);
    out[7] = __brev(1u);
    out[8] = min(-1, 5u);           // mixed: compares as unsigned
    out[9] = max(3u, 7u);
    out[10] = (unsigned)min(-2, 1) + 10u;
    out[11] = __float2int_rn(2.5f) + 10 * __float2int_rn(3.5f);
    out[12] = (unsigned)__float2int_rz(1e20f);
    out[13] = __funnelshift_l(0x80000000u, 1u, 1);
    out[14] = isnan(f[0] / f[0]) + 2 * isinf(1.0f / f[0]) + 4 * isfinite(f[1]);
    out[15] = __ldg(out);
    wide[0] = __umul64hi(0xD2511F53D2511F53ull, 0x1234567812345678ull);
    wide[1] = __popcll(~0ull);
    f[2] = min(f[1], NAN);
    f[3] = cospif(0.5f);
    f[4] = cospif(1.0f);
    f[5] = rsqrtf(16.0f);
    f[6] = fmaf(1.0f + 0x1p-23f, 1.0f + 0x1p-23f, -1.0f);
    f[7] = __expf(0.0f) + __logf(1.0f) + expm1f(0.0f) + log1pf(0.0f) + tanhf(0.0f) + powf(2.0f, 3.0f);
    f[7] += __saturatef(7.0f);
    f[8] = sinpif(1.0f);
    float4 v = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
    reinterpret_cast<float4*>(f)[3] = v;
    const uint2 q = make_uint2(7u, 9u);
    f[16] = q.x + make_int4(1, 2, 3, 4).w + make_double2(0.5, 1.5).y + warpSize;
}
"""

M = np.uint64(0xFFFFFFFFFFFFFFFF)


@pytest.fixture(scope="module", params=SCHEDULES)
def sim(request: pytest.FixtureRequest) -> Iterator[Sim]:
    yield from make_sim(TEXT, schedule=request.param, poison="ff")


def test_indices_in_three_dimensions(sim: Sim):
    out = sim.zeros(24 * 24, np.int32)
    sim.launch("indices", (2, 3, 4), (4, 3, 2), out)
    expected = np.arange(24)[:, None] * 10000 + np.arange(24)
    assert (sim.read(out, 24 * 24, np.int32).reshape(24, 24) == expected).all()


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("shuffle_int", np.int32),
        ("shuffle_unsigned", np.uint32),
        ("shuffle_float", np.float32),
        ("shuffle_double", np.float64),
        ("shuffle_long", np.int64),
        ("shuffle_u64", np.uint64),
    ],
)
def test_shuffles(sim: Sim, kernel: str, dtype: type):
    out = sim.zeros(4 * 64, dtype)
    sim.launch(kernel, 1, 64, out)
    t = np.arange(64)
    lane, base = t % 32, t - t % 32
    segment = t - t % 16
    sources = [
        segment + (t * 7 + 3) % 16,
        np.where(t % 16 < 5, t, t - 5),
        np.where(lane + 3 > 31, t, t + 3),
        base + (lane ^ 9),
    ]
    got = sim.read(out, 4 * 64, dtype).reshape(4, 64)
    for row, expected in zip(got, sources, strict=True):
        assert (row == expected * 3).all()


def test_a_lane_beyond_the_block_gives_nan(sim: Sim):
    out = sim.zeros(4 * 8, np.float32)
    sim.launch("shuffle_float", 1, 8, out)
    down = sim.read(out, 32)[16:24]
    assert (down[:5] == np.arange(3, 8) * 3).all()
    assert np.isnan(down[5:]).all()


def test_votes_and_reductions(sim: Sim):
    out = sim.zeros(14 * 64, np.uint32)
    sim.launch("votes", 1, 64, out)
    got = sim.read(out, 14 * 64, np.uint32).reshape(14, 2, 32)
    t = np.arange(64).reshape(2, 32)

    def mask(flags: np.ndarray) -> np.ndarray:
        return (flags.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1, dtype=np.uint64)

    expected = [
        mask(t % 3 == 0)[:, None],
        np.array([[0], [1]]),
        np.array([[1], [0]]),
        t.sum(1, keepdims=True),
        (-t).max(1, keepdims=True) + 100,
        t.min(1, keepdims=True),
        np.full((2, 1), 255),
        np.full((2, 1), 0xFFFFFF00),
        np.bitwise_xor.reduce(t, 1, keepdims=True),
        mask(t[:, None, :] % 4 == t[:, :, None] % 4),
        np.full((2, 1), 13),
        np.ones((2, 1)),
        np.ones((2, 1)),
        np.zeros((2, 1)),
    ]
    for row, (actual, reference) in enumerate(zip(got, expected, strict=True)):
        assert (actual == reference).all(), row


def test_halves_of_a_warp_go_their_own_way(sim: Sim):
    out = sim.zeros(3 * 64, np.int32)
    sim.launch("diverged", 3, 64, out)
    lane = np.arange(192) % 32
    expected = np.where(lane < 16, 3 * (lane ^ 1) + 3, 16) + 1600
    assert (sim.read(out, 192, np.int32) == expected).all()


@pytest.mark.parametrize("count", [1, 31, 33, 90, 128])
def test_returned_threads_are_not_waited_for(sim: Sim, count: int):
    out = sim.zeros(128, np.int32)
    sim.launch("early_return", 1, 128, out, np.int32(count))
    warp = np.minimum(32, count - np.arange(128) // 32 * 32)
    expected = np.where(np.arange(128) < count, warp * 1001, 0)
    assert (sim.read(out, 128, np.int32) == expected).all()


def test_templates_have_their_own_shared_memory(sim: Sim):
    f, d = sim.zeros(20), sim.zeros(20, np.float64)
    sim.launch("sums", 20, 256, f, d)
    total = np.float32(256 * 0.25 * 255 * 256 / 2)
    assert (sim.read(f, 20) == total).all()
    assert (sim.read(d, 20, np.float64) == 256.0 * total + 255 * 128).all()


def test_atomics_over_many_blocks(sim: Sim):
    i, u = sim.zeros(4, np.int32), sim.upload(np.array([0, 0, 0xFFFFFFFF, 0, 0, 0], np.uint32))
    w = sim.zeros(3, np.uint64)
    n = 40 * 96
    sim.launch("atomics", 40, 96, i, u, w)
    assert sim.read(i, 4, np.int32).tolist() == [n * (n - 1) // 2, n - 1, -(n - 1), -n]
    assert sim.read(u, 6, np.uint32).tolist() == [n, 0xFFFFFFFF, 0, 0, 1, 1]
    assert sim.read(w, 3, np.uint64).tolist() == [n << 33, (n - 1) << 32, 3 * n]


def test_the_last_block_sees_what_the_others_wrote(sim: Sim):
    x = np.random.default_rng(0).integers(-100, 100, 50 * 64).astype(np.float32)
    address, parts, counter, out = sim.upload(x), sim.zeros(50), sim.zeros(1, np.uint32), sim.zeros(1)
    for _ in range(3):
        sim.launch("ticket", 50, 64, address, parts, counter, out)
        assert sim.read(out, 1)[0] == x.sum()
        assert sim.read(counter, 1, np.uint32)[0] == 0


def test_dynamic_shared_memory(sim: Sim):
    for count in (1, 33, 12288):
        out = sim.zeros(count)
        sim.launch("dynamic", 2, 64, out, np.int32(count), shared=count * 4)
        assert (sim.read(out, count) == np.arange(count)[::-1]).all()


def test_parameters_of_every_size(sim: Sim):
    out = sim.zeros(6, np.int32)
    pair = np.zeros((), np.dtype([("c", "i1"), ("d", "f8")], align=True))
    pair["c"], pair["d"] = 5, 6.0
    vector = np.array([1, 2, 3, 8], np.float32)
    sim.launch("parameters", 1, 1, np.int8(-3), np.float64(2.5), np.int16(-4), pair, out, vector)
    assert sim.read(out, 6, np.int32).tolist() == [-3, 2, -4, 5, 6, 9]
    function = sim.function("parameters")
    layout = [sim.ok(sim.driver.cuFuncGetParamInfo(function, i)) for i in range(6)]
    assert layout == [(0, 1), (8, 8), (16, 2), (24, 16), (40, 8), (48, 16)]
    assert sim.driver.cuFuncGetParamInfo(function, 6)[0] == Result.CUDA_ERROR_INVALID_VALUE


def test_bits_conversions_and_mathematics(sim: Sim):
    f = sim.upload(np.array([0.0, 2.0, *[0] * 15], np.float32))
    out, wide = sim.zeros(16, np.uint32), sim.zeros(2, np.uint64)
    sim.launch("bits", 1, 1, out, wide, f)
    assert sim.read(out, 16, np.uint32).tolist() == [
        *(0x3F800000, 1, 0xD2511F53 * 0x12345678 >> 32, 8, 31, 32, 4, 0x80000000),
        *(5, 7, 8, 42, 0x7FFFFFFF, 3, 7, 0x3F800000),
    ]
    assert sim.read(wide, 2, np.uint64).tolist() == [0xD2511F53D2511F53 * 0x1234567812345678 >> 64, 64]
    got = sim.read(f, 17)
    assert got[2:9].tolist() == [2.0, 0.0, -1.0, 0.25, float(np.float32(2**-22 + 2**-46)), 10.0, 0.0]
    assert got[12:17].tolist() == [1, 2, 3, 4, 7 + 4 + 1.5 + 32]


def test_orders_agree_bit_for_bit():
    results = []
    for schedule in SCHEDULES:
        for workers in (1, 2, 4):
            for opened in make_sim(TEXT, schedule=schedule, workers=workers):
                f, d = opened.zeros(300), opened.zeros(300, np.float64)
                opened.launch("sums", 300, 256, f, d)
                results.append((opened.read(f, 300).tobytes(), opened.read(d, 300, np.float64).tobytes()))
    assert len(set(results)) == 1

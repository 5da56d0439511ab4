// Vector types, conversions, bit operations and mathematics as CUDA names them, for the simulated device.
//
// glibc's functions stand in for CUDA's: results differ in the last bits, so tests compare with tolerances. What is
// a macro here is one because some glibc or C++ library declares a function of that name.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "fx_sim.h"

#define FX_SIM_VECTORS(T, name, align1, align2, align4)                                             \
    struct name##1 { T x; };                                                                        \
    struct __attribute__((aligned(align2))) name##2 { T x, y; };                                    \
    struct name##3 { T x, y, z; };                                                                  \
    struct __attribute__((aligned(align4))) name##4 { T x, y, z, w; };                              \
    static inline name##1 make_##name##1(T x) { return {x}; }                                       \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                       \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
FX_SIM_VECTORS(float, float, 4, 8, 16)
FX_SIM_VECTORS(int, int, 4, 8, 16)
FX_SIM_VECTORS(double, double, 8, 16, 16)
FX_SIM_VECTORS(short, short, 2, 4, 8)
FX_SIM_VECTORS(unsigned short, ushort, 2, 4, 8)
FX_SIM_VECTORS(signed char, char, 1, 2, 4)
FX_SIM_VECTORS(unsigned char, uchar, 1, 2, 4)
FX_SIM_VECTORS(long long, longlong, 8, 16, 16)
FX_SIM_VECTORS(unsigned long long, ulonglong, 8, 16, 16)
#undef FX_SIM_VECTORS
struct uint1 { unsigned x; };
struct __attribute__((aligned(8))) uint2 { unsigned x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
FX_SIM_INLINE To fx_sim_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}
FX_SIM_INLINE unsigned __float_as_uint(float v) { return fx_sim_bits<unsigned>(v); }
FX_SIM_INLINE int __float_as_int(float v) { return fx_sim_bits<int>(v); }
FX_SIM_INLINE float __uint_as_float(unsigned v) { return fx_sim_bits<float>(v); }
FX_SIM_INLINE float __int_as_float(int v) { return fx_sim_bits<float>(v); }
FX_SIM_INLINE long long __double_as_longlong(double v) { return fx_sim_bits<long long>(v); }
FX_SIM_INLINE double __longlong_as_double(long long v) { return fx_sim_bits<double>(v); }

FX_SIM_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
FX_SIM_INLINE int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
FX_SIM_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
FX_SIM_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
FX_SIM_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
FX_SIM_INLINE int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
FX_SIM_INLINE int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
FX_SIM_INLINE int __ffs(int v) { return __builtin_ffs(v); }
FX_SIM_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
FX_SIM_INLINE unsigned __brev(unsigned v) {
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(v);
}
FX_SIM_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31u)) >> 32);
}
FX_SIM_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31u));
}

template <class T> FX_SIM_INLINE T __ldg(const T* p) { return *p; }
template <class T> FX_SIM_INLINE T __ldcg(const T* p) { return *p; }
template <class T> FX_SIM_INLINE T __ldca(const T* p) { return *p; }
template <class T> FX_SIM_INLINE T __ldcs(const T* p) { return *p; }
template <class T> FX_SIM_INLINE T __ldcv(const T* p) { return *const_cast<const volatile T*>(p); }
template <class T> FX_SIM_INLINE void __stcg(T* p, T value) { *p = value; }
template <class T> FX_SIM_INLINE void __stcs(T* p, T value) { *p = value; }
template <class T> FX_SIM_INLINE void __stwt(T* p, T value) { *p = value; }

// CUDA's overloads: mixed signedness compares as unsigned, floats drop NaN.
#define FX_SIM_MINMAX(A, B, R)                                                                               \
    FX_SIM_INLINE R min(A a, B b) { return static_cast<R>(b) < static_cast<R>(a) ? static_cast<R>(b) : static_cast<R>(a); } \
    FX_SIM_INLINE R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); }
FX_SIM_MINMAX(int, int, int)
FX_SIM_MINMAX(unsigned, unsigned, unsigned)
FX_SIM_MINMAX(int, unsigned, unsigned)
FX_SIM_MINMAX(unsigned, int, unsigned)
FX_SIM_MINMAX(long, long, long)
FX_SIM_MINMAX(unsigned long, unsigned long, unsigned long)
FX_SIM_MINMAX(long long, long long, long long)
FX_SIM_MINMAX(unsigned long long, unsigned long long, unsigned long long)
FX_SIM_MINMAX(long long, unsigned long long, unsigned long long)
FX_SIM_MINMAX(unsigned long long, long long, unsigned long long)
#undef FX_SIM_MINMAX
FX_SIM_INLINE float min(float a, float b) { return fminf(a, b); }
FX_SIM_INLINE float max(float a, float b) { return fmaxf(a, b); }
FX_SIM_INLINE double min(double a, double b) { return fmin(a, b); }
FX_SIM_INLINE double max(double a, double b) { return fmax(a, b); }
FX_SIM_INLINE double min(float a, double b) { return fmin(static_cast<double>(a), b); }
FX_SIM_INLINE double min(double a, float b) { return fmin(a, static_cast<double>(b)); }
FX_SIM_INLINE double max(float a, double b) { return fmax(static_cast<double>(a), b); }
FX_SIM_INLINE double max(double a, float b) { return fmax(a, static_cast<double>(b)); }

FX_SIM_INLINE float fx_sim_rsqrtf(float x) { return 1.0f / sqrtf(x); }
FX_SIM_INLINE double fx_sim_rsqrt(double x) { return 1.0 / sqrt(x); }
// Argument reduced first: cos(pi x) is exact at multiples of 1/2, as CUDA's is.
FX_SIM_INLINE double fx_sim_sinpi(double x) {
    const double r = x - 2.0 * rint(0.5 * x);  // in [-1, 1]
    if (r == 0.0 || fabs(r) == 1.0) return copysign(0.0, x);
    if (fabs(r) == 0.5) return copysign(1.0, r);
    return sin(3.14159265358979323846 * r);
}
FX_SIM_INLINE double fx_sim_cospi(double x) {
    const double r = fabs(x - 2.0 * rint(0.5 * x));
    if (r == 0.5) return 0.0;
    return cos(3.14159265358979323846 * r);
}
FX_SIM_INLINE float fx_sim_sinpif(float x) { return static_cast<float>(fx_sim_sinpi(x)); }
FX_SIM_INLINE float fx_sim_cospif(float x) { return static_cast<float>(fx_sim_cospi(x)); }
FX_SIM_INLINE float fx_sim_exp10f(float x) { return static_cast<float>(pow(10.0, x)); }
#define rsqrtf(x) fx_sim_rsqrtf(x)
#define rsqrt(x) fx_sim_rsqrt(x)
#define sinpif(x) fx_sim_sinpif(x)
#define cospif(x) fx_sim_cospif(x)
#define sinpi(x) fx_sim_sinpi(x)
#define cospi(x) fx_sim_cospi(x)
#define exp10f(x) fx_sim_exp10f(x)
FX_SIM_INLINE void sincospif(float x, float* s, float* c) {
    *s = fx_sim_sinpif(x);
    *c = fx_sim_cospif(x);
}
FX_SIM_INLINE double fx_sim_normcdf(double x) { return 0.5 * erfc(-0.70710678118654752440 * x); }
#define normcdff(x) static_cast<float>(fx_sim_normcdf(x))
#define normcdf(x) fx_sim_normcdf(x)

#define __expf(x) expf(x)
#define __exp10f(x) fx_sim_exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define __fdividef(x, y) ((x) / (y))
#define fdividef(x, y) ((x) / (y))
#define __saturatef(x) fminf(fmaxf((x), 0.0f), 1.0f)

FX_SIM_INLINE float __fadd_rn(float a, float b) { return a + b; }
FX_SIM_INLINE float __fsub_rn(float a, float b) { return a - b; }
FX_SIM_INLINE float __fmul_rn(float a, float b) { return a * b; }
FX_SIM_INLINE float __fdiv_rn(float a, float b) { return a / b; }
FX_SIM_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
FX_SIM_INLINE float __frcp_rn(float a) { return 1.0f / a; }
FX_SIM_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
FX_SIM_INLINE float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
FX_SIM_INLINE double __dadd_rn(double a, double b) { return a + b; }
FX_SIM_INLINE double __dmul_rn(double a, double b) { return a * b; }
FX_SIM_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// Conversions saturate and turn NaN into 0, as the instructions do (a C++ cast would be undefined).
template <class T>
FX_SIM_INLINE T fx_sim_saturate(double v, double low, double high, T least, T most) {
    if (v != v) return 0;
    return v <= low ? least : v >= high ? most : static_cast<T>(v);
}
FX_SIM_INLINE int fx_sim_int(double v) { return fx_sim_saturate<int>(v, -2147483648.0, 2147483647.0, INT32_MIN, INT32_MAX); }
FX_SIM_INLINE unsigned fx_sim_uint(double v) { return fx_sim_saturate<unsigned>(v, 0.0, 4294967295.0, 0u, UINT32_MAX); }
FX_SIM_INLINE int __float2int_rn(float v) { return fx_sim_int(rint(v)); }
FX_SIM_INLINE int __float2int_rz(float v) { return fx_sim_int(trunc(v)); }
FX_SIM_INLINE int __float2int_rd(float v) { return fx_sim_int(floor(v)); }
FX_SIM_INLINE int __float2int_ru(float v) { return fx_sim_int(ceil(v)); }
FX_SIM_INLINE unsigned __float2uint_rn(float v) { return fx_sim_uint(rint(v)); }
FX_SIM_INLINE unsigned __float2uint_rz(float v) { return fx_sim_uint(trunc(v)); }
FX_SIM_INLINE unsigned __float2uint_rd(float v) { return fx_sim_uint(floor(v)); }
FX_SIM_INLINE float __int2float_rn(int v) { return static_cast<float>(v); }
FX_SIM_INLINE float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
FX_SIM_INLINE float __double2float_rn(double v) { return static_cast<float>(v); }
FX_SIM_INLINE float __ull2float_rn(unsigned long long v) { return static_cast<float>(v); }
FX_SIM_INLINE double __ull2double_rn(unsigned long long v) { return static_cast<double>(v); }

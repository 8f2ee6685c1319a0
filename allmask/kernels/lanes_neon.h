/* lanes.h for ARM: a vector of sixteen numbers is four NEON registers. Sums are added in the order of AVX2. */

#include <arm_neon.h>
#include <string.h>

typedef struct { float32x4_t q[4]; } vec;
typedef struct { int32x4_t q[4]; } ints;
typedef struct { uint32x4_t q[4]; } mask; /* all 32 bits of a number are set or clear */

/* f of each register of x; of x and y; of x, y and z */
#define EACH(type, f, x) ((type){{f((x).q[0]), f((x).q[1]), f((x).q[2]), f((x).q[3])}})
#define EACH_TWO(type, f, x, y) \
    ((type){{f((x).q[0], (y).q[0]), f((x).q[1], (y).q[1]), f((x).q[2], (y).q[2]), f((x).q[3], (y).q[3])}})
#define EACH_THREE(type, f, x, y, z)                                        \
    ((type){{f((x).q[0], (y).q[0], (z).q[0]), f((x).q[1], (y).q[1], (z).q[1]), \
             f((x).q[2], (y).q[2], (z).q[2]), f((x).q[3], (y).q[3], (z).q[3])}})
#define SAME(type, one) ((type){{one, one, one, one}})

INLINE vec zeros(void) { return SAME(vec, vdupq_n_f32(0)); }
INLINE vec all(float x) { return SAME(vec, vdupq_n_f32(x)); }
INLINE vec load(const float *from) {
    return (vec){{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}
INLINE void save(float *to, vec x) {
    vst1q_f32(to, x.q[0]), vst1q_f32(to + 4, x.q[1]), vst1q_f32(to + 8, x.q[2]), vst1q_f32(to + 12, x.q[3]);
}
INLINE vec add(vec a, vec b) { return EACH_TWO(vec, vaddq_f32, a, b); }
INLINE vec sub(vec a, vec b) { return EACH_TWO(vec, vsubq_f32, a, b); }
INLINE vec mul(vec a, vec b) { return EACH_TWO(vec, vmulq_f32, a, b); }
INLINE vec divide(vec a, vec b) { return EACH_TWO(vec, vdivq_f32, a, b); }
INLINE vec mul_add(vec a, vec b, vec c) { return EACH_THREE(vec, vfmaq_f32, c, a, b); }
INLINE vec mul_sub(vec a, vec b, vec c) { return EACH_THREE(vec, vfmsq_f32, c, a, b); } /* c - a · b */
INLINE vec size_of(vec x) { return EACH(vec, vabsq_f32, x); }
INLINE vec to_nearest(vec x) { return EACH(vec, vrndnq_f32, x); }

INLINE float32x4_t power_of_two(int32x4_t n) { /* for -126 <= n <= 127 */
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
INLINE float32x4_t four_times_power(float32x4_t x, float32x4_t n) { /* in two steps, to reach subnormal numbers */
    int32x4_t whole = vmaxq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(-252)), half = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(x, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
}
INLINE vec times_power(vec x, vec n) { return EACH_TWO(vec, four_times_power, x, n); } /* x · 2^n for whole n */
INLINE float32x4_t four_times_normal_power(float32x4_t x, float32x4_t n) {
    return vmulq_f32(x, power_of_two(vcvtnq_s32_f32(n)));
}
INLINE vec times_normal_power(vec x, vec n) { /* for -126 <= n <= 127 */
    return EACH_TWO(vec, four_times_normal_power, x, n);
}

INLINE float sum_of(vec x) {
    float32x4_t four = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
INLINE float largest_of(vec x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3])));
}

INLINE ints places(void) { return (ints){{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}}; }
INLINE ints no_ints(void) { return SAME(ints, vdupq_n_s32(0)); }
INLINE ints all_ints(int32_t x) { return SAME(ints, vdupq_n_s32(x)); }

INLINE mask first(int64_t n) { /* the first n places */
    int32_t count = n < 0 ? 0 : n > LANES ? LANES : n;
    return EACH_TWO(mask, vcgtq_s32, all_ints(count), places());
}
INLINE mask above(vec a, vec b) { return EACH_TWO(mask, vcgtq_f32, a, b); }
INLINE mask at_most(vec a, vec b) { return EACH_TWO(mask, vcleq_f32, a, b); }
INLINE mask negative(vec x) { return EACH(mask, vcltzq_f32, x); }
INLINE uint32x4_t four_are_nan(float32x4_t x) { return vmvnq_u32(vceqq_f32(x, x)); }
INLINE mask is_nan(vec x) { return EACH(mask, four_are_nan, x); }
INLINE int any(mask m) {
    return vmaxvq_u32(vorrq_u32(vorrq_u32(m.q[0], m.q[1]), vorrq_u32(m.q[2], m.q[3]))) != 0;
}
INLINE vec choose(mask m, vec yes, vec no) { return EACH_THREE(vec, vbslq_f32, m, yes, no); }
INLINE vec larger_of(vec a, vec b) { return choose(above(a, b), a, b); } /* b, if either is NaN */
INLINE vec smaller_of(vec a, vec b) { return choose(above(b, a), a, b); }

/* NEON has no masked loads and stores: the numbers of a mask made by `first` are copied. */
INLINE int64_t count_of(mask m) { /* each number that is set is -1 */
    uint32x4_t sum = vaddq_u32(vaddq_u32(m.q[0], m.q[1]), vaddq_u32(m.q[2], m.q[3]));
    return -(int32_t)vaddvq_u32(sum);
}
INLINE vec load_some(mask m, const float *from) { /* elsewhere 0, unread */
    int64_t count = count_of(m);
    if (count == LANES) return load(from);
    float sixteen[LANES] = {0};
    memcpy(sixteen, from, count * sizeof(float));
    return load(sixteen);
}
INLINE void save_some(mask m, float *to, vec x) {
    int64_t count = count_of(m);
    if (count == LANES) {
        save(to, x);
        return;
    }
    float sixteen[LANES];
    save(sixteen, x);
    memcpy(to, sixteen, count * sizeof(float));
}

INLINE ints load_ints(const void *from) {
    const uint8_t *bytes = from;
    return (ints){{vreinterpretq_s32_u8(vld1q_u8(bytes)), vreinterpretq_s32_u8(vld1q_u8(bytes + 16)),
                   vreinterpretq_s32_u8(vld1q_u8(bytes + 32)), vreinterpretq_s32_u8(vld1q_u8(bytes + 48))}};
}
INLINE void save_ints(void *to, ints x) {
    uint8_t *bytes = to;
    vst1q_u8(bytes, vreinterpretq_u8_s32(x.q[0])), vst1q_u8(bytes + 16, vreinterpretq_u8_s32(x.q[1]));
    vst1q_u8(bytes + 32, vreinterpretq_u8_s32(x.q[2])), vst1q_u8(bytes + 48, vreinterpretq_u8_s32(x.q[3]));
}
INLINE ints as_bits(vec x) { return EACH(ints, vreinterpretq_s32_f32, x); }
INLINE vec as_floats(ints bits) { return EACH(vec, vreinterpretq_f32_s32, bits); }
INLINE ints load_some_ints(mask m, const void *from) { return as_bits(load_some(m, from)); }
INLINE ints add_ints(ints a, ints b) { return EACH_TWO(ints, vaddq_s32, a, b); }
INLINE ints sub_ints(ints a, ints b) { return EACH_TWO(ints, vsubq_s32, a, b); }
INLINE ints mul_ints(ints a, ints b) { return EACH_TWO(ints, vmulq_s32, a, b); }
INLINE ints either(ints a, ints b) { return EACH_TWO(ints, veorq_s32, a, b); }
INLINE int32x4_t four_shifted(int32x4_t x, int32x4_t to_left) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), to_left));
}
INLINE ints shifted(ints x, const int bits) { /* to the right, unsigned */
    return EACH_TWO(ints, four_shifted, x, all_ints(-bits));
}
INLINE uint32x4_t four_at_least(int32x4_t a, int32x4_t b) {
    return vcgeq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b));
}
INLINE mask at_least(ints a, ints b) { return EACH_TWO(mask, four_at_least, a, b); } /* unsigned */
INLINE ints to_ints(vec x) { return EACH(ints, vcvtnq_s32_f32, x); }
INLINE vec to_floats(ints x) { return EACH(vec, vcvtq_f32_s32, x); }
INLINE int32_t sum_of_ints(ints x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.q[0], x.q[1]), vaddq_s32(x.q[2], x.q[3])));
}

/* Sixteen numbers of 16 bits */
typedef struct { uint16x8_t a, b; } halves;

INLINE halves load_halves(const void *from) {
    const uint8_t *bytes = from;
    return (halves){vreinterpretq_u16_u8(vld1q_u8(bytes)), vreinterpretq_u16_u8(vld1q_u8(bytes + 16))};
}
INLINE void save_halves(void *to, halves x) {
    uint8_t *bytes = to;
    vst1q_u8(bytes, vreinterpretq_u8_u16(x.a)), vst1q_u8(bytes + 16, vreinterpretq_u8_u16(x.b));
}
INLINE vec load_bf16(const uint16_t *from) { /* bf16 is the upper half of fp32 */
    halves x = load_halves(from);
    ints bits = {{vreinterpretq_s32_u32(vshll_n_u16(vget_low_u16(x.a), 16)),
                  vreinterpretq_s32_u32(vshll_n_u16(vget_high_u16(x.a), 16)),
                  vreinterpretq_s32_u32(vshll_n_u16(vget_low_u16(x.b), 16)),
                  vreinterpretq_s32_u32(vshll_n_u16(vget_high_u16(x.b), 16))}};
    return as_floats(bits);
}
INLINE uint16x4_t upper_halves(float32x4_t x) { /* to the nearest bf16, ties to even */
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
INLINE halves rounded(vec x) {
    return (halves){vcombine_u16(upper_halves(x.q[0]), upper_halves(x.q[1])),
                    vcombine_u16(upper_halves(x.q[2]), upper_halves(x.q[3]))};
}
INLINE void save_bf16(uint16_t *to, int64_t n, vec x) { /* the first n */
    uint16_t sixteen[LANES];
    save_halves(n >= LANES ? to : sixteen, rounded(x));
    if (n < LANES) memcpy(to, sixteen, (n > 0 ? n : 0) * sizeof(uint16_t));
}

/* Dropout, decided by a hash: the backward pass decides again instead of reading what was decided. */

#include "lanes.h"

INLINE uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Which of the elements j to j + 15 of a row are kept, from the 64-bit hash of the row; `dropped`: probability · 2^32 */
INLINE mask not_dropped(uint64_t row, int64_t j, uint32_t dropped) {
    ints x = mul_ints(add_ints(places(), all_ints((int32_t)j)), all_ints((int32_t)0x9e3779b9u));
    x = add_ints(x, all_ints((int32_t)row));
    x = mul_ints(either(x, shifted(x, 16)), all_ints(0x21f0aaad));
    x = add_ints(x, all_ints((int32_t)(row >> 32)));
    x = mul_ints(either(x, shifted(x, 15)), all_ints(0x735a2d97));
    return at_least(either(x, shifted(x, 15)), all_ints((int32_t)dropped));
}

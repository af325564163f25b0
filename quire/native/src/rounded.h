/* Activations as whole numbers, with one scale for each row: how they lie in memory.
 *
 * A number is q = 128 * high + low, two int8, of at most MOST_OF_TWO. Where a weight asks for inputs
 * of one int8, q is low alone. Both planes are multiplied exactly, so how a number is cut does not
 * show in a product.
 *
 * Rows are cut into tiles of TILE_ROWS, the last of which has what is left over. A tile begins with
 * the scales of its rows. Then come blocks of 32 inputs, each with all that its rows need of it, so
 * a product reads one stream and needs one address:
 *
 *     int8 low[rows][32], high[rows][32], int32 sums[3][rows], float totals[3][rows]
 *
 * Sums are of the first 16 numbers, of the other 16, and of all; totals are the same as floats,
 * which hold them exactly.
 */
#ifndef QUIRE_ROUNDED_H
#define QUIRE_ROUNDED_H

#include "lanes.h"
#include "quire_native.h"

#define TILE_ROWS (LANES == 16 ? 8 : 4) /* three registers for each row, of 32 or 16 */
#define HIGH_SHIFT 7
#define MOST_OF_ONE 127.0f
#define MOST_OF_TWO (127.0f * 128.0f)

/* Rows of the tile that begins at a row, `left` rows before the last. */
static inline int tile_rows(int64_t left) {
    return left < TILE_ROWS ? (int)left : TILE_ROWS;
}

static inline int64_t rounded_row_bytes(int64_t num_in) { return ROUNDED_ROW_BYTES(num_in); }

/* The first block of a tile, and how far apart blocks are. */
static inline const int8_t *blocks_of(const int8_t *tile, int rows) { return tile + 4 * rows; }
static inline int64_t block_stride(int rows) { return (int64_t)rows * ROUNDED_BYTES; }

/* Where the planes and the numbers of a block's rows begin. */
static inline const int8_t *high_of(const int8_t *block, int rows) { return block + BLOCK * rows; }
static inline const int32_t *sums_of(const int8_t *block, int rows) {
    return (const int32_t *)(block + 2 * BLOCK * rows);
}
static inline const float *totals_of(const int8_t *block, int rows) {
    return (const float *)(block + 2 * BLOCK * rows) + 3 * rows;
}

#endif

/* Activations rounded to int8, with one scale for each row and 32 inputs: how they lie in memory.
 *
 * Rows are cut into tiles of TILE_ROWS; what is left over into tiles of half as many, and so on. A
 * tile holds its blocks of 32 inputs one after the other, each with all that its rows need of it,
 * so a product reads one stream and needs one address:
 *
 *     int8 codes[rows][32], float scales[rows], int32 sums[3][rows], float totals[3][rows]
 *
 * Sums are of the first 16 codes, of the other 16, and of all. A total is a sum of codes times the
 * scale; the third is the sum of the other two.
 */
#ifndef QUIRE_ROUNDED_H
#define QUIRE_ROUNDED_H

#include "lanes.h"
#include "quire_native.h"

#define TILE_ROWS (LANES == 16 ? 8 : 4) /* two registers for each row, of 32 or 16 */

/* Rows of the tile that begins at a row, `left` rows before the last. */
static inline int tile_rows(int64_t left) {
    int rows = TILE_ROWS;
    while (rows > left) rows /= 2;
    return rows;
}

static inline int64_t rounded_row_bytes(int64_t num_in) { return num_in / BLOCK * ROUNDED_BYTES; }

/* One block of a tile, and where the numbers of its rows begin. */
static inline const float *scales_of(const int8_t *block, int rows) {
    return (const float *)(block + BLOCK * rows);
}
static inline const int32_t *sums_of(const int8_t *block, int rows) {
    return (const int32_t *)scales_of(block, rows) + rows;
}
static inline const float *totals_of(const int8_t *block, int rows) {
    return scales_of(block, rows) + 4 * rows;
}

#endif

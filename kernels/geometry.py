"""Shapes of the parts that the schedules work on: paddings, tiles, chunks, blocks and slabs. Pure Python."""

from collections.abc import Callable

# An odd V is six times slower in cuBLAS (50257 against 50304, H200): rows of logits start at a multiple of 64 elements.
ROW_ALIGNMENT = 64
TILE_ROWS, TILE_CLASSES = 128, 256  # of the GEMM in gemm.py, and about what cuBLAS takes

# One chunk of 43008 x 50257 logits ended in an illegal memory access of cuBLAS (H200; not without the last class).
MAX_ELEMENTS = 2**31 - 1

# Statistics are 3 fp32 numbers for each half tile of a row, 3/64 of the row's bf16 logits: a chunk has this many times
# the rows, and still less memory.
STATISTICS_ROWS = 16

CUBLAS_TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (192, 128), (320, 128))  # seen on an H200
SPLIT_K_SHARE = 0.85  # of its speed that cuBLAS keeps by cutting the inner dimension, whatever the tiles
# A part of classes is worth its launches, and no faster for being larger: it is in no cache then.
MOST_TILES = 32
PART_COLUMNS = 600  # what the launches of a part take, in columns of a tile


def padded(vocab: int) -> int:
    """Elements from one row of logits to the next."""
    return -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT


def class_tiles(vocab: int) -> int:
    """Tiles of `gemm.py` in a row of logits."""
    return -(-vocab // TILE_CLASSES)


def largest_chunk(vocab: int) -> int:
    """Rows of logits that may be alive at once."""
    return max(MAX_ELEMENTS // padded(vocab), 1)


def slab_classes(chunk: int, n_tokens: int, vocab: int, width: int, multiprocessors: int) -> int:
    """Classes of a slab of all tokens in backward: as fast as may be, in no more memory than `chunk` rows of logits.

    Or one tile of classes, which is the smallest slab.
    """
    row_tiles = -(-n_tokens // TILE_ROWS)

    def columns(tiles: int) -> float:
        logits = waves(row_tiles * tiles, multiprocessors) * width
        share = cublas_share(tiles * TILE_CLASSES, width, multiprocessors)
        dweight = tiles * width * n_tokens / (TILE_ROWS * multiprocessors * share)
        return (logits + dweight + PART_COLUMNS) / tiles

    fitting = chunk * vocab // (max(n_tokens, 1) * TILE_CLASSES)
    return _fastest(fitting, vocab, columns)


def dhidden_rows(n_tokens: int, width: int, multiprocessors: int) -> int:
    """Rows of dhidden whose tiles just keep all multiprocessors busy, but no more than there are."""
    return min(max(multiprocessors // -(-width // TILE_CLASSES), 1) * TILE_ROWS, n_tokens)


def block_of(chunk: int, n_tokens: int, vocab: int, width: int, multiprocessors: int) -> tuple[int, int]:
    """Tokens and classes of a block of exponentials in forward, with an fp32 dhidden of its tokens beside it.

    Together they take no more memory than `chunk` rows of logits, or are the smallest that there is.
    """
    row_tiles = -(-max(dhidden_rows(n_tokens, width, multiprocessors), 1) // TILE_ROWS)

    def fitting() -> int:
        return (chunk * vocab // (row_tiles * TILE_ROWS) - 2 * width) // TILE_CLASSES

    while row_tiles > 1 and fitting() < 4:
        row_tiles //= 2

    def columns(tiles: int) -> float:
        return (waves(row_tiles * tiles, multiprocessors) * width + PART_COLUMNS) / tiles

    return row_tiles * TILE_ROWS, _fastest(fitting(), vocab, columns)


def waves(tiles: int, multiprocessors: int) -> int:
    """Tiles that each multiprocessor makes one after another."""
    return -(-tiles // multiprocessors)


def cublas_share(rows: int, columns: int, multiprocessors: int) -> float:
    """The part of its speed that cuBLAS keeps on [rows, columns]: it takes the tile that leaves the fewest idle."""

    def busy(tile_rows: int, tile_columns: int) -> float:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        whole = rows * columns / (tile_rows * tile_columns)
        return whole / (waves(tiles, multiprocessors) * multiprocessors)

    return max(*(busy(*tile) for tile in CUBLAS_TILES), SPLIT_K_SHARE)


def _fastest(fitting: int, vocab: int, columns: Callable[[int], float]) -> int:
    """Classes in the number of tiles, of those that fit, that costs the fewest columns for each tile."""
    largest = min(max(fitting, 1), MOST_TILES, class_tiles(vocab))
    return min(min(range(largest, 0, -1), key=columns) * TILE_CLASSES, vocab)

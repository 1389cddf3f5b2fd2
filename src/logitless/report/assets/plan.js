// The bytes of kernels/plan.py and kernels/geometry.py, for a loss and both gradients of a head without bias on an
// H200: its logits come from the GEMM with the softmax in its epilogue, or, in fp32 and where the width is no multiple
// of 8, from cuBLAS. Hidden states have the dtype of the weight. tests/test_calculator.py compares with Python.
"use strict";

const MULTIPROCESSORS = 132;
const ROW_ALIGNMENT = 64, TILE_ROWS = 128, TILE_CLASSES = 256, MAX_ELEMENTS = 2 ** 31 - 1;
const CUBLAS_TILES = [[128, 256], [256, 128], [192, 192], [128, 192], [192, 128], [320, 128]];
const SPLIT_K_SHARE = 0.85, MOST_TILES = 32, PART_COLUMNS = 600;
const BYTES = { fp32: 4, bf16: 2 };

const ceilDiv = (a, b) => Math.ceil(a / b);
const floorDiv = (a, b) => Math.floor(a / b);
const padded = (vocab) => ceilDiv(vocab, ROW_ALIGNMENT) * ROW_ALIGNMENT;
const classTiles = (vocab) => ceilDiv(vocab, TILE_CLASSES);
const largestChunk = (vocab) => Math.max(floorDiv(MAX_ELEMENTS, padded(vocab)), 1);
const waves = (tiles) => ceilDiv(tiles, MULTIPROCESSORS);

function cublasShare(rows, columns) {
  const busy = CUBLAS_TILES.map(([tileRows, tileColumns]) => {
    const tiles = ceilDiv(rows, tileRows) * ceilDiv(columns, tileColumns);
    return (rows * columns) / (tileRows * tileColumns) / (waves(tiles) * MULTIPROCESSORS);
  });
  return Math.max(...busy, SPLIT_K_SHARE);
}

// Classes in the number of tiles, of those that fit, that costs the fewest columns for each tile.
function fastest(fitting, vocab, columns) {
  let best = Math.min(Math.max(fitting, 1), MOST_TILES, classTiles(vocab));
  for (let tiles = best - 1; tiles > 0; tiles--) if (columns(tiles) < columns(best)) best = tiles;
  return Math.min(best * TILE_CLASSES, vocab);
}

function slabClasses(chunk, tokens, vocab, width) {
  const rowTiles = ceilDiv(tokens, TILE_ROWS);
  const columns = (tiles) => {
    const logits = waves(rowTiles * tiles) * width;
    const share = cublasShare(tiles * TILE_CLASSES, width);
    const dweight = (tiles * width * tokens) / (TILE_ROWS * MULTIPROCESSORS * share);
    return (logits + dweight + PART_COLUMNS) / tiles;
  };
  return fastest(floorDiv(chunk * vocab, Math.max(tokens, 1) * TILE_CLASSES), vocab, columns);
}

function dhiddenRows(tokens, width) {
  return Math.min(Math.max(floorDiv(MULTIPROCESSORS, ceilDiv(width, TILE_CLASSES)), 1) * TILE_ROWS, tokens);
}

// Tokens and classes of a block of exponentials in the forward pass over slabs.
function blockOf(chunk, tokens, vocab, width) {
  let rowTiles = ceilDiv(Math.max(dhiddenRows(tokens, width), 1), TILE_ROWS);
  const fitting = () => floorDiv(floorDiv(chunk * vocab, rowTiles * TILE_ROWS) - 2 * width, TILE_CLASSES);
  while (rowTiles > 1 && fitting() < 4) rowTiles = floorDiv(rowTiles, 2);
  const columns = (tiles) => (waves(rowTiles * tiles) * width + PART_COLUMNS) / tiles;
  return [rowTiles * TILE_ROWS, fastest(fitting(), vocab, columns)];
}

// head: {tokens, vocab, width, dtype, weightDtype}. `transient` is `peak` less the gradients; `sum` is what of it is
// the fp32 sum of dweight, `casts` what of it is copies in `dtype` of hidden states and weight.
function predict(head, schedule, givenChunk) {
  const { tokens, vocab, width, dtype, weightDtype } = head;
  const chunk = Math.min(givenChunk, largestChunk(vocab), Math.max(tokens, 1));
  const size = BYTES[dtype], weightSize = BYTES[weightDtype];
  const isFused = dtype === "bf16" && width % 8 === 0;
  const dhidden = tokens * width * weightSize, dweight = vocab * width * weightSize;
  const returned = dhidden + dweight;
  const casts = weightSize === size ? 0 : (tokens + vocab) * width * size;
  const vector = 4 * tokens;
  const logits = chunk * padded(vocab) * size;
  if (schedule === "vocab") {
    const slab = tokens * padded(slabClasses(chunk, tokens, vocab, width)) * size;
    let block = logits + 4 * vector;
    if (isFused) {
      const [most, classes] = blockOf(chunk, tokens, vocab, width);
      const rows = Math.max(Math.min(most, tokens), 1);
      block = rows * (padded(classes) * size + 4 * width + 4 * classTiles(vocab)) + 6 * vector;
    }
    const peak = Math.max(casts + dhidden + block, returned + casts + slab + 8 * vector);
    return { schedule, chunk, peak, transient: peak - returned, sum: 0, casts };
  }
  const sum = vocab * width * (chunk >= tokens ? weightSize : 4);
  const copy = sum === dweight ? 0 : dweight;
  let parts = logits;
  if (isFused) {
    const products = weightSize < 4 ? 4 * dhiddenRows(chunk, width) * width : 0;
    parts += Math.max(4 * classTiles(vocab) * chunk, products) + chunk * width * size + 2 * vector + 4 * chunk;
  }
  const forward = dhidden + sum + casts + parts + 4 * vector;
  const backward = dhidden + sum + copy + 2 * vector;
  const peak = Math.max(forward, backward);
  const isBackward = backward > forward;
  return {
    schedule, chunk, peak, transient: peak - returned,
    sum: isBackward ? copy && sum : sum - dweight, casts: isBackward ? 0 : casts,
  };
}

// Three tensors like the logits in the compute dtype; what the eager path with its loss in fp32 peaks at; one tensor.
// With the copies that autocast makes.
function others({ tokens, vocab, width, dtype, weightDtype }) {
  const casts = BYTES[weightDtype] === BYTES[dtype] ? 0 : (tokens + vocab) * width * BYTES[dtype];
  const logits = tokens * vocab * BYTES[dtype];
  return { logits, textbook: 3 * logits, eager: 12 * tokens * vocab, inplace: logits, casts };
}

// What a mask lets through, proven from its matrix. The same results as allmask/mask/prover.py; a test compares both.

import { positionsOf, visible as matrixOf } from "./mask.js";

const range = (n) => [...Array(n).keys()];

/** The product of two boolean matrices: what is reached by a step of `a` and then one of `b`. */
function product(a, b) {
  const n = a.length;
  return a.map((row) => {
    const found = Array(n).fill(0);
    for (let middle = 0; middle < n; middle++) {
      if (row[middle]) for (let k = 0; k < n; k++) found[k] |= b[middle][k];
    }
    return found;
  });
}

const same = (a, b) => a.every((row, q) => row.every((cell, k) => cell === b[q][k]));

/** What each row may depend on after so many layers; null: any number. A residual connection adds the row itself. */
export function influence(visible, layers = null) {
  const n = visible.length;
  const base = visible.map((row, q) => row.map((cell, k) => Number(cell || q === k)));
  const steps = layers == null ? Math.max(n - 1, 1) : Math.min(layers, Math.max(n - 1, 1));
  let power = base;
  for (let step = 1; step < steps; step++) {
    const next = product(power, base);
    if (same(next, power)) return power;
    power = next;
  }
  return power;
}

/** A shortest chain of reads from `reader` to `key`, [reader, …, key]; null if there is none. */
export function pathBetween(visible, reader, key) {
  const from = new Map([[reader, null]]);
  const queue = [reader];
  while (queue.length) {
    const here = queue.shift();
    if (here === key) {
      const path = [];
      for (let at = key; at != null; at = from.get(at)) path.unshift(at);
      return path;
    }
    visible[here].forEach((cell, next) => {
      if (cell && !from.has(next)) {
        from.set(next, here);
        queue.push(next);
      }
    });
  }
  return null;
}

const paddingOf = (visible) => visible.map((row, i) => !row.some(Boolean) && !visible.some((other) => other[i]));

/** The smallest reason why a matrix is no order: the broken law, and the positions that break it; null if it is one. */
export function findWitness(visible) {
  const padding = paddingOf(visible);
  const all = range(visible.length);
  const alone = all.find((i) => !visible[i][i] && !padding[i]);
  if (alone !== undefined) return { kind: "reflexive", positions: [alone] };
  const twice = product(visible, visible);
  for (const q of all) {
    for (const k of all) {
      if (twice[q][k] && !visible[q][k]) {
        const between = all.find((i) => visible[q][i] && visible[i][k]);
        return { kind: "transitive", positions: [q, between, k] };
      }
    }
  }
  const tied = visible.map((row, q) => row.map((cell, k) => Number(cell || visible[k][q])));
  const tiedTwice = product(tied, tied);
  for (const q of all) {
    for (const k of all) {
      if (tiedTwice[q][k] && !tied[q][k]) {
        return { kind: "total", positions: [q, k, all.find((i) => tied[q][i] && tied[k][i])] };
      }
    }
  }
  return null;
}

/** Whether a matrix is an order, and then that order and its documents; -1 is padding. */
export function recoverOrder(visible) {
  const padding = paddingOf(visible);
  const either = visible.map((row, q) => row.map((cell, k) => Number(cell || visible[k][q])));
  const together = influence(either);
  const sameDocument = (a, b) => together[a][b] && !padding[a] && !padding[b];
  const all = range(visible.length);
  const head = all.map((i) => all.find((j) => sameDocument(i, j)) ?? 0);
  const heads = all.filter((i) => !padding[i] && head[i] === i);
  const group = all.map((i) => (padding[i] ? -1 : heads.indexOf(head[i])));
  const twice = product(visible, visible);
  const exact =
    all.every((i) => visible[i][i] || padding[i]) &&
    all.every((q) => all.every((k) => !twice[q][k] || visible[q][k])) &&
    all.every((q) => all.every((k) => !sameDocument(q, k) || either[q][k]));
  const first = all.map((i) => (all.find((j) => visible[i][j] && visible[j][i]) ?? 0) === i);
  const order = all.map((q) => all.filter((k) => visible[q][k] && !visible[k][q] && first[k]).length);
  return { exact, order, group };
}

/** The finest blocks of tokens that can be added one after another without changing the rows before. */
export function cacheBlocks(visible) {
  const reach = influence(visible);
  const padding = paddingOf(visible);
  const all = range(visible.length);
  const blockOf = (i) => all.filter((j) => reach[i][j] && reach[j][i]);
  const heads = all.filter((i) => !padding[i] && blockOf(i)[0] === i);
  const waiting = new Map(heads.map((i) => [i, heads.filter((j) => j !== i && reach[i][j]).length]));
  const blocks = [];
  while (waiting.size) {
    const next = heads.find((i) => waiting.get(i) === 0); // the leftmost that needs nothing more
    waiting.delete(next);
    blocks.push(blockOf(next));
    for (const reader of waiting.keys()) if (reach[reader][next]) waiting.set(reader, waiting.get(reader) - 1);
  }
  return blocks;
}

/** [position, label] of shifted targets: each position predicts the next token of its document in the order. */
export function nextTokens(order, group, position) {
  const line = range(order.length)
    .filter((i) => group[i] >= 0)
    .sort((a, b) => group[a] - group[b] || order[a] - order[b] || position[a] - position[b] || a - b);
  const pairs = line.slice(1).map((label, i) => [line[i], label]);
  return pairs.filter(([a, b]) => group[a] === group[b]);
}

/** What the query stream of each row may depend on (XLNet): content that is strictly older, and what that has read. */
function queryStream(visible, layers) {
  const strict = visible.map((row, q) => row.map((cell, k) => Number(cell && !visible[k][q])));
  return layers === 1 ? strict : product(strict, influence(visible, layers == null ? null : layers - 1));
}

/** Analyse a board; `scored` are the positions that bear loss. The fields are those of `Proof.to_dict()`. */
export function prove(board, layers, scored) {
  const visible = matrixOf(board);
  const blocks = cacheBlocks(visible);
  const padding = paddingOf(visible);
  let { exact, order, group } = recoverOrder(visible);
  let position = range(visible.length);
  if (!board.edits.length) {
    ({ order, group } = board);
    position = positionsOf(group);
  } else if (!exact) { // an order that contains the matrix: block after block, in one document
    order = order.map((_, i) => Math.max(0, blocks.findIndex((block) => block.includes(i))));
    group = group.map((_, i) => (padding[i] ? -1 : 0));
  }
  const through = influence(visible, layers);
  const checked = scored.filter((i) => group[i] >= 0);
  const stream = queryStream(visible, layers);
  return {
    visible,
    layers,
    is_order: exact,
    order,
    group,
    witness: exact ? null : findWitness(visible),
    empty_rows: range(visible.length).filter((i) => !visible[i].some(Boolean)),
    scored: checked,
    influence: through,
    reachable: influence(visible),
    leaks: {
      shifted: nextTokens(order, group, position).filter(([q, k]) => checked.includes(q) && through[q][k]),
      masked: checked.map((i) => [i, i]),
      two_stream: checked.filter((i) => stream[i][i]).map((i) => [i, i]),
    },
    cache: { valid: blocks.length > 1, blocks },
  };
}

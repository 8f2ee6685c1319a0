// A mask as an order: who may read whom. The same rules as allmask/mask/mask.py; a test compares both.
//
// A board is { order, group, window, edits }: when each token becomes known, its document, how far it may read
// (null: any distance), and the cells that were clicked, as "row,column". A matrix is a list of rows of 0 and 1.

/** The order and the documents of a kind of mask, for tokens of which some belong to the target. */
export function arrange(kind, isTarget, seed = 1) {
  const n = isTarget.length;
  const index = [...Array(n).keys()];
  const zeros = Array(n).fill(0);
  switch (kind) {
    case "causal": return { order: index, group: zeros };
    case "reverse": return { order: index.map((i) => n - 1 - i), group: zeros };
    case "prefix": return { order: counted(isTarget), group: zeros };
    case "turns": return { order: inTurns(turnsOf(isTarget)), group: zeros };
    case "pairs": return { order: index.map((i) => Math.floor(i / 2)), group: zeros };
    case "permutation": return { order: shuffled(n, seed), group: zeros };
    case "packed": return { order: zeros, group: isTarget.map(Number) };
    default: return { order: zeros, group: zeros }; // bidirectional
  }
}

export const KINDS = ["bidirectional", "causal", "prefix", "turns", "reverse", "permutation", "pairs", "packed"];

function counted(flags) {
  let count = 0;
  return flags.map((flag) => (count += Number(flag)));
}

/** Which tokens of a chat are written, not read: the second half of each text, so each text is a round. */
export function turnsOf(isTarget) {
  const length = (flag) => isTarget.filter((other) => Boolean(other) === flag).length;
  const seen = { true: 0, false: 0 };
  return isTarget.map((flag) => ++seen[Boolean(flag)] > Math.ceil(length(Boolean(flag)) / 2));
}

/** A new time for each token that is written, and for the first token that is read after those. */
function inTurns(written) {
  return counted(written.map((flag, i) => flag || (i > 0 && written[i - 1])));
}

/** A permutation that depends on the seed alone, so that a shared address shows the same one. */
function shuffled(n, seed) {
  let state = (seed * 2654435761) >>> 0;
  const random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  const line = [...Array(n).keys()];
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [line[i], line[j]] = [line[j], line[i]];
  }
  const rank = Array(n);
  line.forEach((position, time) => (rank[position] = time));
  return rank;
}

/** The index of each token within its document. */
export function positionsOf(group) {
  const next = new Map();
  return group.map((document) => {
    const here = next.get(document) ?? 0;
    next.set(document, here + 1);
    return here;
  });
}

/** The matrix that the order allows, without clicked cells: same document, not younger, within the window. */
export function promised({ order, group, window }) {
  const position = positionsOf(group);
  return order.map((now, q) =>
    order.map((then, k) => {
      const near = window == null || Math.abs(position[q] - position[k]) < window;
      return Number(group[q] === group[k] && then <= now && near);
    }),
  );
}

/** The matrix of a board: each clicked cell is the opposite of what the order says. */
export function visible(board) {
  const matrix = promised(board);
  for (const cell of board.edits) {
    const [q, k] = cell.split(",").map(Number);
    matrix[q][k] = 1 - matrix[q][k];
  }
  return matrix;
}

/** An order with the same relations whose numbers are 0, 1, 2, …; half numbers may stand between whole ones. */
export function renumbered(order) {
  const times = [...new Set(order)].sort((a, b) => a - b);
  return order.map((time) => times.indexOf(time));
}

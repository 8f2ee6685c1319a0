// The board as a Python program.

import { turnsOf } from "./mask.js";

/** A program that builds the mask of the board and proves it; a test runs it and compares the matrices. */
export function asPython(board, kind, isTarget, layers) {
  const n = board.order.length;
  const lines = ["import torch", "from allmask import Mask, prove", ""];
  const window = board.window == null ? "" : `, window=${board.window}`;
  const list = (numbers) => `torch.tensor([[${numbers.join(", ")}]])`;
  const valid = `torch.ones(1, ${n}, dtype=torch.bool)`;
  if (kind === "prefix") {
    lines.push(`is_target = ${list(isTarget)}.bool()`, `mask = Mask.prefix(is_target${window})`);
  } else if (kind === "turns") {
    lines.push(`is_target = ${list(turnsOf(isTarget).map(Number))}.bool()`, `mask = Mask.turns(is_target${window})`);
  } else if (["bidirectional", "causal", "reverse"].includes(kind)) {
    lines.push(`mask = Mask.${kind}(${valid}${window})`);
  } else if (kind === "permutation") {
    lines.push(`mask = Mask.permutation(${list(board.order)}${window})`);
  } else {
    lines.push(`order = ${list(board.order)}`, `group = ${list(board.group)}`, `mask = Mask(order, group${window})`);
  }
  if (board.edits.length) {
    lines.push("visible = mask.visible()[0]");
    for (const cell of board.edits) lines.push(`visible[${cell.replace(",", ", ")}] ^= True`);
    lines.push("mask = Mask.from_matrix(visible)");
  }
  lines.push(`print(prove(mask${layers == null ? "" : `, layers=${layers}`}))`);
  return lines.join("\n") + "\n";
}

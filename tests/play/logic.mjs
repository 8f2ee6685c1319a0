// Runs the page's mask logic on cases in JSON (stdin) and writes what it finds (stdout); see test_logic.py.

import { readFileSync } from "node:fs";
import { CLAIMS_ZH } from "../../allmask/play/static/js/claims_zh.js";
import { arrange, KINDS, renumbered } from "../../allmask/play/static/js/mask.js";
import { asPython } from "../../allmask/play/static/js/python.js";
import { inChinese } from "../../allmask/play/static/js/problems.js";
import { pathBetween, prove } from "../../allmask/play/static/js/prover.js";

const { boards, kinds, orders, messages } = JSON.parse(readFileSync(0, "utf8"));

const proofs = boards.map((board) => {
  const proof = prove(board, board.layers, board.scored);
  const all = proof.visible.map((_, i) => i);
  const paths = all.map((q) => all.map((k) => pathBetween(proof.visible, q, k)));
  return { ...proof, paths };
});
const made = kinds.map((isTarget) => Object.fromEntries(KINDS.map((kind) => [kind, arrange(kind, isTarget, 3)])));
const programs = boards.map((board) => asPython(board, board.kind, board.isTarget, board.layers));
console.log(JSON.stringify({ proofs, made, programs, renumbered: orders.map(renumbered), claims: Object.keys(CLAIMS_ZH), messages: messages.map(inChinese) }));

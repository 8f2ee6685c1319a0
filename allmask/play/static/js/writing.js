// Watch it write: probabilities, alternatives, and a cache that grows; under the prefix mask and the naive one.

import { post } from "./api.js";
import { h, percent, put, still, $ } from "./dom.js";
import { currentLanguage, explained, t } from "./i18n.js";
import { SAMPLES } from "./samples.js";
import { onChange } from "./state.js";

const PAUSE = 900; // milliseconds of a step
let lanes = []; // { kind, found, chosen }
let at = 0; // the step that is shown
let timer = null;

export function startWriting() {
  $("write-text").value = SAMPLES[currentLanguage()];
  $("write-en").addEventListener("click", () => sample("en"));
  $("write-zh").addEventListener("click", () => sample("zh"));
  $("write-go").addEventListener("click", begin);
  $("step").addEventListener("input", () => go(+$("step").value));
  $("step-back").addEventListener("click", () => go(at - 1));
  $("step-forward").addEventListener("click", () => go(at + 1));
  $("step-play").addEventListener("click", () => (timer ? pause() : play()));
  onChange((changed) => {
    if (changed.has("language") || changed.has("theme")) show();
    if (changed.has("tab")) pause();
  });
}

function sample(language) {
  $("write-text").value = SAMPLES[language];
  begin();
}

async function begin() {
  pause();
  const kinds = $("write-both").checked ? ["prefix", "naive"] : ["prefix"];
  lanes = await asked(kinds.map((kind) => ({ kind, chosen: [] })));
  at = 0;
  show();
  if (lanes.length) play();
}

/** Ask the server to write each lane; say what went wrong, if something did. */
async function asked(wanted) {
  $("write-problem").hidden = true;
  $("write-go").disabled = true;
  $("write-go").textContent = t("computing");
  try {
    const source = $("write-text").value;
    const found = [];
    for (const lane of wanted) found.push({ ...lane, found: await post("steps", { source, kind: lane.kind, forced: lane.chosen }) });
    return found;
  } catch (error) {
    $("write-problem").hidden = false;
    $("write-problem").textContent = explained(error);
    return [];
  } finally {
    $("write-go").disabled = false;
    $("write-go").textContent = t("go");
  }
}

// ---- the player ---------------------------------------------------------------------------------------------------

const lastStep = () => Math.max(0, ...lanes.map((lane) => lane.found.steps.length - 1));

function play() {
  if (still()) return go(lastStep());
  if (at >= lastStep()) at = 0;
  timer = setInterval(() => (at < lastStep() ? go(at + 1, true) : pause()), PAUSE);
  show();
}

function pause() {
  clearInterval(timer);
  timer = null;
  $("step-play").textContent = t("play");
}

function go(step, playing = false) {
  if (!playing) pause();
  at = Math.max(0, Math.min(step, lastStep()));
  show();
}

function show() {
  $("player").hidden = !lanes.length;
  $("step").max = lastStep();
  $("step").value = at;
  $("step-words").textContent = t("stepOf", { step: at + 1, steps: lastStep() + 1 });
  $("step-play").textContent = t(timer ? "pause" : "play");
  put($("lanes"), lanes.map(drawn));
}

// ---- a lane -------------------------------------------------------------------------------------------------------

function drawn(lane) {
  const { kind, found } = lane;
  const step = Math.min(at, found.steps.length - 1);
  const tokens = found.steps.slice(0, step + 1).map((one, i) =>
    h("button", {
      class: `written${i === step ? " now" : ""}`, style: { "--sure": `${Math.round(one.probability * 100)}%` },
      "aria-label": `${one.ends ? t("end") : one.token}, ${percent(one.probability)}`, onclick: () => go(i),
    }, one.ends ? "∎" : one.token, h("small", {}, percent(one.probability))),
  );
  return h("article", { class: "card lane" },
    h("h3", {}, t(`lane.${kind}`)), h("p", { class: "hint" }, t(`laneHelp.${kind}`)),
    h("div", { class: "written-line" }, tokens),
    alternatives(lane, step), cachePicture(found, step),
  );
}

/** What it nearly wrote; another choice is written on from there. */
function alternatives(lane, step) {
  const now = lane.found.steps[step];
  const choose = async (one) => {
    pause();
    const chosen = [...lane.found.steps.slice(0, step).map((earlier) => earlier.id), one.id];
    const [next] = await asked([{ ...lane, chosen }]);
    if (next) lanes = lanes.map((other) => (other === lane ? next : other));
    show();
  };
  const name = (one) => (one.ends ? t("end") : one.token);
  return h("div", { class: "alternatives" },
    h("h4", {}, t("alternatives", { token: name(now) })), h("p", { class: "hint" }, t("alternativesHelp")),
    now.alternatives.map((one) =>
      h("button", { class: `share${one.id === now.id ? " right" : ""}`, onclick: () => choose(one) },
        h("span", { class: "share-token" }, name(one)),
        h("span", { class: "share-line", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(1, one.probability * 100)}%` } })),
        h("span", { class: "share-number" }, percent(one.probability)),
      ),
    ),
  );
}

/** The matrix so far: rows computed now, rows computed before, and the cache below them. */
function cachePicture(found, step) {
  const { visible, cache, tokens } = found;
  const now = cache[Math.min(step, cache.length - 1)];
  const computed = new Set([...now.new, ...now.again]);
  const known = new Set([...computed, ...now.kept]);
  const n = tokens.length;
  const size = Math.max(3, Math.min(14, Math.floor(340 / n)));
  const canvas = h("canvas", { width: n * size * 2, height: n * size * 2, style: { width: `${n * size}px` } });
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  const inset = size > 5 ? 1 : 0.4;
  for (let q = 0; q < n; q++) {
    for (let k = 0; k < n; k++) {
      if (!known.has(q) || !known.has(k)) context.fillStyle = colour("--faint");
      else if (!visible[q][k]) context.fillStyle = colour("--empty");
      else context.fillStyle = colour(computed.has(q) ? "--accent" : "--accent-soft");
      context.fillRect(k * size + inset / 2, q * size + inset / 2, size - inset, size - inset);
    }
  }
  const until = cache.slice(0, step + 1);
  const sum = (count) => until.reduce((total, one) => total + count(one), 0);
  const counts = { computed: sum((one) => one.new.length + one.again.length), uncached: sum((one) => one.new.length + one.again.length + one.kept.length) };
  const words = now.kept.length ? t("oneRow", { kept: now.kept.length }) : t("prefilled", { count: now.new.length });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", words);
  return h("div", { class: "cache" },
    canvas,
    h("div", { class: "cache-bar", role: "img", "aria-label": t("cacheBar", { count: now.kept.length }) },
      h("span", { style: { width: `${(100 * now.kept.length) / n}%` } }), h("span", { class: "now", style: { width: `${(100 * computed.size) / n}%` } })),
    h("p", {}, t("cacheBar", { count: now.kept.length })),
    h("p", { class: "hint" }, words, " ", t("counter", counts)),
    h("p", { class: "legend", "aria-hidden": "true" }, h("i", { class: "now" }), t("computedNow"), h("i", { class: "kept" }), t("computedBefore")),
  );
}

// The claims board: a tile for each claim, with a button that runs it.

import { get, post } from "./api.js";
import { CLAIMS_ZH } from "./claims_zh.js";
import { h, put, $ } from "./dom.js";
import { currentLanguage, explained, t } from "./i18n.js";
import { onChange, state } from "./state.js";

let claims = null;
let running = null; // the name of the claim that runs

export function startClaims() {
  onChange(async (changed) => {
    if (changed.has("tab") && state.tab === "claims" && !claims) {
      try {
        claims = await get("claims");
      } catch (error) {
        return complain(error);
      }
    }
    if (claims && (changed.has("tab") || changed.has("language"))) show();
  });
}

function complain(error) {
  $("claims-problem").hidden = false;
  $("claims-problem").textContent = explained(error);
}

async function run(name) {
  running = name;
  $("claims-problem").hidden = true;
  show();
  try {
    const done = await post("claims", { name });
    claims = claims.map((claim) => (claim.name === name ? { ...done, ran: Date.now() } : claim));
  } catch (error) {
    complain(error);
  }
  running = null;
  show();
  document.querySelector(`[data-claim="${name}"] button`)?.focus({ preventScroll: true });
}

function show() {
  put($("tiles"), claims.map(tile));
}

function tile(claim) {
  const { result } = claim;
  const level = running === claim.name ? "running" : (result?.level ?? "none");
  const chinese = currentLanguage() === "zh" ? CLAIMS_ZH[claim.name] : null;
  const [title, statement] = chinese ?? [claim.title, claim.statement];
  const lang = chinese ? "zh-Hans" : "en";
  const verdict = running === claim.name ? t("running") : result ? t(`level.${result.level}`) : t("notRun");
  return h("article", { class: `tile ${level}`, "data-claim": claim.name },
    h("h3", { lang }, `${claim.name} · ${title}`),
    h("p", { class: "level", role: "status" }, verdict, result ? h("small", {}, ` ${t("seconds", { seconds: result.seconds })}`) : null),
    result ? h("p", { class: "figure", lang: "en" }, result.figure) : null,
    result?.plot ? h("img", { src: `/play/api/claims/${claim.name}.svg?${claim.ran ?? 0}`, alt: result.figure, loading: "lazy" }) : null,
    h("p", { lang }, statement),
    h("details", {}, h("summary", {}, t("criterion")), h("p", { lang: "en" }, claim.criterion), h("p", { class: "hint", lang: "en" }, `${t("claimSource")}: ${claim.source}`)),
    claim.quick ? runButton(claim) : h("p", { class: "hint" }, t("inTerminal"), " ", h("code", {}, `allmask claims ${claim.name}`)),
  );
}

function runButton({ name, result }) {
  const words = t(result ? "again" : "run");
  return h("button", { class: "quiet", disabled: running != null, onclick: () => run(name), "aria-label": `${words}: ${name}` }, words);
}

// Share, copy as Python, download.

import { postForFile } from "./api.js";
import { h, $ } from "./dom.js";
import { explained, t } from "./i18n.js";
import { asPython } from "./python.js";
import { boardRequest, change, onChange, state } from "./state.js";

export function startTools() {
  $("share").addEventListener("click", () => copy(location.href));
  $("python").addEventListener("click", () => copy(asPython(state, state.kind, state.isTarget.map(Number), state.layers)));
  for (const format of ["svg", "png"]) $(format).addEventListener("click", () => download(format));
  $("reset").addEventListener("click", () => change({ edits: [], path: null }));
  onChange((changed) => {
    $("reset").hidden = !state.edits.length;
    if (changed.has("edits")) $("said").textContent = state.edits.length ? t("clicks", { count: state.edits.length }) : "";
    $("copy-box").hidden = true;
  });
}

/** Copy a text; where the browser does not allow it, show it to be copied by hand. */
async function copy(text) {
  $("copy-text").value = text;
  try {
    await navigator.clipboard.writeText(text);
    $("said").textContent = t("copied");
  } catch {
    $("copy-box").hidden = false;
    $("copy-text").focus();
    $("copy-text").select();
  }
}

async function download(format) {
  try {
    const file = await postForFile("picture", { ...boardRequest(), tokens: state.tokens, title: t(`kind.${state.kind}`), format });
    const address = URL.createObjectURL(file);
    const link = h("a", { href: address, download: `mask.${format}` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  } catch (error) {
    $("said").textContent = explained(error);
  }
}

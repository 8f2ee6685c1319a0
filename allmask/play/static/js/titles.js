// Titles: paste a text, get titles.

import { post } from "./api.js";
import { h, put, $ } from "./dom.js";
import { currentLanguage, explained, t } from "./i18n.js";
import { LONG } from "./samples.js";
import { onChange } from "./state.js";

export function startTitles() {
  $("title-text").value = LONG[currentLanguage()];
  $("title-go").addEventListener("click", write);
  for (const language of ["en", "zh"]) {
    $(`title-${language}`).addEventListener("click", () => {
      $("title-text").value = LONG[language];
      count();
      write();
    });
  }
  $("title-text").addEventListener("input", count);
  $("title-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) write();
  });
  onChange((changed) => changed.has("language") && count());
}

function count() {
  $("title-count").textContent = t("charactersLeft", { count: [...$("title-text").value].length });
}

async function write() {
  const button = $("title-go");
  button.disabled = true;
  button.textContent = t("computing");
  $("title-problem").hidden = true;
  const began = performance.now();
  try {
    const found = await post("titles", { source: $("title-text").value, beams: 4, count: 3 });
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    put($("title-list"),
      h("ol", { class: "title-list" }, found.titles.map((one) => h("li", {}, h("span", {}, one.text || t("nothing")), h("small", {}, t("score", { score: one.score }))))),
      h("p", { class: "hint" }, t("modelUsed", { model: found.model, seconds })),
    );
  } catch (error) {
    $("title-problem").hidden = false;
    $("title-problem").textContent = explained(error);
  } finally {
    button.disabled = false;
    button.textContent = t("titlesGo");
  }
}

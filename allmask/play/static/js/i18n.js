// The language of the page.

import { inChinese } from "./problems.js";
import { WORDS } from "./words.js";

let language = "en";

/** The words of a key, with values for what stands in braces. */
export function t(key, values = {}) {
  const text = WORDS[language][key] ?? WORDS.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export const currentLanguage = () => language;

/** Use a language, and put its words into every element with data-t (its text) or data-t-label (its aria-label). */
export function useLanguage(name) {
  language = WORDS[name] ? name : "en";
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  document.title = t("title");
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-t-label]")) element.setAttribute("aria-label", t(element.dataset.tLabel));
}

/** A number of layers in words; null is any number. */
export const layersText = (n) => (n == null ? t("anyLayers") : n === 1 ? t("oneLayer") : t("nLayers", { n }));

/** An error as a sentence: what is wrong, and what to do. */
export function explained({ message, hint }) {
  const parts = [message, hint].filter(Boolean);
  return language === "zh" ? `${parts.map(inChinese).join("：")}。` : parts.join(". ");
}

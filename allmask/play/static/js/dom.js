// Elements are made here. Text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** h("button", { class: "chip", onclick: f, "aria-label": "…" }, "text", child) */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Replace what is inside an element. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child != null));
}

/** A function that runs once, `wait` milliseconds after the last call. */
export function debounced(run, wait) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), wait);
  };
}

/** Whether the reader asked for less motion. */
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const percent = (share) => (share >= 0.0995 ? `${Math.round(share * 100)}%` : `${(share * 100).toFixed(1)}%`);

/** Move a roving tab stop among buttons by the arrow keys; `columns` is how many stand in a row. */
export function roving(event, items, columns = items.length) {
  const at = items.indexOf(document.activeElement);
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  let next = at + (steps[event.key] ?? 0);
  if (event.key === "Home") next = at - (at % columns);
  if (event.key === "End") next = at - (at % columns) + columns - 1;
  if (at < 0 || next === at || !items[next]) return false;
  event.preventDefault();
  items[at].tabIndex = -1;
  items[next].tabIndex = 0;
  items[next].focus();
  return true;
}

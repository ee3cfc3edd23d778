// A field in which a label is found by typing a part of its name.

import { element } from "./showing.js";

const MOST = 50;

export function finder(field, list, classes, choose) {
  let hits = [];
  let place = 0;

  function look() {
    const wanted = field.value.trim().toLowerCase();
    const ranked = classes()
      .map((name, number) => ({ name, number, at: name.toLowerCase().indexOf(wanted) }))
      .filter((hit) => hit.at >= 0)
      .sort((a, b) => a.at - b.at || a.name.length - b.name.length || a.number - b.number);
    hits = wanted ? ranked : ranked.sort((a, b) => a.number - b.number);
    hits = hits.slice(0, MOST);
    place = 0;
    list.replaceChildren(...hits.map((hit, at) => {
      const item = element("li", hit.name, "name");
      item.id = `found-${at}`;
      item.setAttribute("role", "option");
      item.addEventListener("mousedown", (event) => { event.preventDefault(); take(at); });
      return item;
    }));
    if (!hits.length) list.append(element("li", "no label has that in its name", "none"));
    mark();
    list.hidden = false;
    field.setAttribute("aria-expanded", "true");
  }

  function mark() {
    [...list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === place && hits.length > 0)));
    if (hits.length) {
      field.setAttribute("aria-activedescendant", `found-${place}`);
      list.children[place].scrollIntoView({ block: "nearest" });
    } else field.removeAttribute("aria-activedescendant");
  }

  function close() {
    list.hidden = true;
    field.value = "";
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
  }

  function take(at) {
    const hit = hits[at];
    if (!hit) return;
    close();
    field.blur();
    choose(hit.number);
  }

  field.addEventListener("focus", look);
  field.addEventListener("input", look);
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && hits.length) {
      event.preventDefault();
      place = (place + by + hits.length) % hits.length;
      mark();
    } else if (event.key === "Enter") {
      event.preventDefault();
      take(place);
    }
  });
  return { close: () => { if (document.activeElement !== field) close(); } };
}

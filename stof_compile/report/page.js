"use strict";
(() => {
  const nodes = Array.from(document.querySelectorAll("a.node[data-group]"));
  const mark = (node, on) => {
    const graph = node.closest("section.graph-of");
    for (const other of nodes) {
      if (other.dataset.group === node.dataset.group && other.closest("section.graph-of") === graph) {
        other.classList.toggle("same", on);
      }
    }
  };
  for (const node of nodes) {
    for (const [event, on] of [["mouseenter", true], ["focus", true], ["mouseleave", false], ["blur", false]]) {
      node.addEventListener(event, () => mark(node, on));
    }
  }
  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) { return; }
    for (let box = target.closest("details"); box; box = box.parentElement && box.parentElement.closest("details")) {
      box.open = true;
    }
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();
  document.documentElement.dataset.ready = "yes";
})();

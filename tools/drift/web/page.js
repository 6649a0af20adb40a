"use strict";
// Without this the page is whole: cells are links, and an explanation is shown as the target of the address.
(function () {
  const grids = Array.from(document.querySelectorAll(".grid"));
  const visible = (row) => !row.classList.contains("closed");
  const rowsOf = (grid) => Array.from(grid.querySelectorAll(".row:not(.head)")).filter(visible);
  const cellsOf = (row) => Array.from(row.querySelectorAll(".cell a"));
  let last = null;

  // One stop for the Tab key in each grid; the arrows move within it.
  function stop(grid, link) {
    for (const other of grid.querySelectorAll(".cell a")) other.tabIndex = other === link ? 0 : -1;
  }
  function move(grid, link, across, down, edge) {
    const rows = rowsOf(grid);
    const row = link.closest(".row");
    let at = rows.indexOf(row), column = cellsOf(row).indexOf(link);
    if (edge === "Home" || edge === "End") {
      column = edge === "Home" ? 0 : cellsOf(row).length - 1;
    } else {
      at = Math.min(Math.max(at + down, 0), rows.length - 1);
      column = Math.min(Math.max(column + across, 0), cellsOf(rows[at]).length - 1);
    }
    const next = cellsOf(rows[at])[column];
    stop(grid, next);
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  for (const grid of grids) {
    const first = grid.querySelector(".cell a.act") || grid.querySelector(".cell a.changed") || grid.querySelector(".cell a");
    if (first) stop(grid, first);
    grid.addEventListener("keydown", (event) => {
      const link = event.target.closest(".cell a");
      if (!link || event.altKey || event.ctrlKey || event.metaKey) return;
      if (steps[event.key]) move(grid, link, ...steps[event.key]);
      else if (event.key === "Home" || event.key === "End") move(grid, link, 0, 0, event.key);
      else if (event.key === " ") link.click();
      else return;
      event.preventDefault();
    });
  }

  // The newest is what a reader wants first.
  for (const box of document.querySelectorAll(".scroll")) box.scrollLeft = box.scrollWidth;

  // The deltas of a feature in which nothing happened are folded away.
  const keys = document.querySelector(".keys");
  if (keys) keys.hidden = false;
  for (const row of document.querySelectorAll(".row.feature")) {
    const inner = Array.from(row.parentElement.querySelectorAll(".row.delta")).filter((one) => one.dataset.of === row.dataset.name);
    if (!inner.length) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "toggle";
    button.setAttribute("aria-label", "Deltas of " + row.dataset.name);
    const show = (open) => {
      button.setAttribute("aria-expanded", String(open));
      for (const one of inner) one.classList.toggle("closed", !open);
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
    row.show = show;
    row.querySelector(".name").prepend(button);
    show(row.dataset.quiet !== "yes");
  }

  // What is open: its cell is marked, and the reader is put there.
  function opened(focus) {
    for (const link of document.querySelectorAll(".cell a[aria-current]")) link.removeAttribute("aria-current");
    const id = decodeURIComponent(location.hash.slice(1));
    const article = id ? document.getElementById(id) : null;
    if (!article || article.tagName !== "ARTICLE") return;
    const link = Array.from(document.querySelectorAll(".cell a")).find((one) => one.getAttribute("href") === location.hash);
    if (link) {
      const row = link.closest(".row");
      const feature = Array.from(document.querySelectorAll(".row.feature")).find((one) => one.dataset.name === row.dataset.of);
      if (feature && feature.show && !visible(row)) feature.show(true);
      link.setAttribute("aria-current", "true");
      stop(link.closest(".grid"), link);
      last = link;
    }
    if (focus) article.focus({ preventScroll: true });
    article.scrollIntoView({ block: "nearest" });
  }
  window.addEventListener("hashchange", () => opened(true));
  opened(false);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !location.hash || location.hash === "#matrix") return;
    location.hash = "#matrix";
    if (last) setTimeout(() => last.focus(), 0);
  });

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const pre = button.parentElement.querySelector("pre");
      const text = pre.textContent;
      try {
        await navigator.clipboard.writeText(text);
      } catch (error) {
        const range = document.createRange();
        range.selectNodeContents(pre);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();

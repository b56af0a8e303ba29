"use strict";
// Sorts and filters the trials, copies code. Without it, all words, tables and charts are there.
(() => {
  const all = (what, within = document) => [...within.querySelectorAll(what)];

  for (const table of all("table.trials")) {
    const rows = all("tbody tr", table);
    const heads = all("thead th", table);
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value;
      const isNumber = head.classList.contains("number");
      const compare = isNumber
        ? (a, b) => Number(value(a)) - Number(value(b))
        : (a, b) => value(a).localeCompare(value(b), undefined, { numeric: true });
      const unknown = (row) => value(row) === "";  // last, whichever way
      rows.sort((a, b) => unknown(a) - unknown(b) || (ascending ? compare(a, b) : compare(b, a)));
      table.tBodies[0].append(...rows);
    }));
    const words = document.getElementById("filter-words");
    const outcome = document.getElementById("filter-outcome");
    const count = document.getElementById("filter-count");
    const filter = () => {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !(wanted.every((word) => text.includes(word))
          && (!outcome.value || row.dataset.outcome === outcome.value));
      }
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    };
    words.addEventListener("input", filter);
    outcome.addEventListener("change", filter);
    filter();
  }

  for (const button of all(".code button")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {  // a page opened as a file may not write to the clipboard
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
})();

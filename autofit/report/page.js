"use strict";
// Draws the charts, sorts and filters the trials, copies code. Without it, all words and tables are
// there all the same.
(async () => {
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

  const plots = all(".plot");
  const packed = document.getElementById("plotly").textContent;
  try {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  } catch (error) {
    for (const plot of plots) plot.textContent = `This browser cannot draw the chart (${error}).`;
    return;
  }
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const toItsElement = (plot) => Plotly.relayout(plot, { autosize: true });
  for (const plot of plots) {
    const { data, layout: { height, ...layout } } = figures[plot.dataset.figure];
    plot.style.height = `${height}px`;  // of the element: a height in the layout pins the width
    const scalable = () => {  // so that a printer can scale what was drawn for the screen
      for (const svg of all(".main-svg", plot)) {
        svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      }
    };
    const roomForLegend = () => {  // its lines depend on the width: they must not eat the plot
      const legend = plot.querySelector(".legend");
      const needed = height + (legend ? Math.max(0, legend.getBBox().height - 28) : 0);
      if (Math.abs(plot.clientHeight - needed) > 4) {
        plot.style.height = `${needed}px`;
        toItsElement(plot);
      }
    };
    await Plotly.newPlot(plot, data, layout, { displayModeBar: false, responsive: true });
    plot.on("plotly_afterplot", () => { scalable(); roomForLegend(); });
    scalable();
    roomForLegend();
  }
  const atWidth = (width) => plots.forEach((plot) => {
    plot.style.width = width;
    toItsElement(plot);
  });
  addEventListener("beforeprint", () => atWidth("660px"));
  addEventListener("afterprint", () => atWidth(""));
  document.documentElement.dataset.drawn = plots.length;
})();

// Formulas are drawn in the page by the KaTeX that lies beside this file.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const source = element.textContent;
  katex.render(source.slice(2, -2), element, {
    displayMode: source.startsWith("\\["),
    throwOnError: false,
  });
});

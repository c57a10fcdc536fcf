// The search of the site, for questions in whole sentences.
//
// Sphinx wants every word of a question on the page. Here a page counts for each word that it
// has: rare words count more, words of its title three times, and long pages count less. The
// specification, figures and the changelog come after the pages that are for users.
const LATER = /^(spec|conformance|examples)\/|^C[A-Z]+$|^docs\/(figures|scale|reference)(\/|$)/;

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;

  Search.performTermsSearch = (searchTerms, excludedTerms) => {
    const { terms, titleterms, docnames, filenames, titles } = Search._index;
    const pagesOf = (table, word) =>
      Object.hasOwn(table, word) ? [table[word]].flat() : [];

    const length = new Array(docnames.length).fill(0);
    for (const word of Object.keys(terms))
      for (const page of pagesOf(terms, word)) length[page] += 1;
    const average = length.reduce((sum, one) => sum + one, 0) / length.length;

    const score = new Map();
    for (const word of searchTerms) {
      const inTitle = new Set(pagesOf(titleterms, word));
      const pages = new Set([...pagesOf(terms, word), ...inTitle]);
      const rarity = Math.log(1 + docnames.length / (1 + pages.size));
      for (const page of pages) {
        const weight = (inTitle.has(page) ? 3 : 1) / (0.75 + (0.25 * length[page]) / average);
        score.set(page, (score.get(page) ?? 0) + rarity * weight);
      }
    }
    for (const word of excludedTerms)
      for (const page of [...pagesOf(terms, word), ...pagesOf(titleterms, word)])
        score.delete(page);

    return [...score].map(([page, points]) => [
      docnames[page],
      titles[page],
      "",
      null,
      LATER.test(docnames[page]) ? points / 3 : points,
      filenames[page],
      SearchResultKind.text,
    ]);
  };
});

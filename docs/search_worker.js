// docs/site_hooks.py appends this to the theme's search worker. It mends a bug of lunr
// (github.com/olivernn/lunr.js/issues/503), which takes two nodes of its tree of words for the same
// if their texts are. Its own text joins the letter and the number of each edge without a mark, so
// that "1" to node 23 and "2" to node 4 read like "1" to node 2324. Numbers on any page could thus
// hide other words, and a search that met one that doesn't exist showed nothing at all.
lunr.TokenSet.prototype.toString = function () {
  const edges = Object.keys(this.edges).sort();
  return `${+this.final}${edges.map((letter) => `${letter}${this.edges[letter].id};`).join("")}`;
};

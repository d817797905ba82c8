// Words such as "a" and "to" are left out of a search: the theme looks for every word that begins
// with them. So are characters that the theme's search takes for operators (`:` after the name of a
// field, quotes, a leading `-`): an error message that somebody pastes has them.
// docs/site_hooks.py says how much a page counts.
const LEFT_OUT = new Set(
  ("a about an and are as at be by can do does for from have how i if in is it may me mean my not of on or " +
    "our should that the there this to use want was we what when where which why will with you your").split(" ")
);
const QUERY = 2; // the kind of message by which the page asks its search worker

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type === QUERY && typeof message.data === "string") {
    const words = message.data.replace(/[?:;,!"`()[\]{}<>|=~^*+]|(?<!\S)[-']+|'(?!\S)/g, " ").split(/\s+/).filter(Boolean);
    const kept = words.filter((word) => !LEFT_OUT.has(word.toLowerCase()));
    message = { ...message, data: (kept.length ? kept : words).join(" ") };
  }
  return post.call(this, message, ...rest);
};

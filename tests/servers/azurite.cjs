// Loaded into Azurite before its own code: it never looks for bodies that no blob names. By itself it does so every ten
// minutes, in time that grows with the square of their number, and answers nobody meanwhile. Bodies that were just sent
// may also be gone then, before their blob stands.
const path = require("path");

const constants = require(path.join(path.dirname(process.argv[1]), "utils", "constants"));

constants.DEFAULT_GC_INTERVAL_MS = 2 ** 31 - 1; // the most that a timer takes: 24 days

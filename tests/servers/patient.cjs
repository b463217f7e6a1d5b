// Loaded into servers in JavaScript before their own code: no connection or request ends because it takes long.
// By itself Node.js ends connections that were idle for 5 s. On a busy machine it does so also where the next request
// has arrived, and nobody can tell what came of that one.
const { Server } = require("http");

const { listen } = Server.prototype;

Server.prototype.listen = function (...given) {
  Object.assign(this, { keepAliveTimeout: 0, headersTimeout: 0, requestTimeout: 0, timeout: 0 });
  return listen.apply(this, given);
};

// Starts fauxqs on loopback with its data in a folder: `node fauxqs.mjs PORT FOLDER`. Two things are mended when it begins to listen.
import net from "node:net";
import { DatabaseSync } from "node:sqlite";
import { startFauxqs } from "fauxqs";

const [port, folder] = process.argv.slice(2);
const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (options, ...rest) {
  // To make a message visible at once it writes a null where its table takes none, which loses the message. Left out, the row says "in flight" until its time is
  // over, and only a restart reads it.
  new DatabaseSync(`${folder}/fauxqs.db`).exec(`
    CREATE TRIGGER IF NOT EXISTS no_null BEFORE UPDATE ON sqs_messages WHEN NEW.approximate_receive_count IS NULL
    BEGIN SELECT RAISE(IGNORE); END
  `);
  // By itself it listens to everybody.
  return listen.call(this, { ...options, host: "127.0.0.1" }, ...rest);
};
await startFauxqs({ port: Number(port), dataDir: folder, logger: false });

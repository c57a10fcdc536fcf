BEGIN TRANSACTION;
CREATE TABLE carried (             -- whose events a GET stream takes, and how far it is
        sid INTEGER NOT NULL,
        origin TEXT NOT NULL,
        fencing_epoch INTEGER NOT NULL,
        log_epoch TEXT NOT NULL,
        number INTEGER NOT NULL,
        PRIMARY KEY (sid, origin)
    ) WITHOUT ROWID;
INSERT INTO "carried" VALUES(2,'one',1,'1795911578339135686',3);
CREATE TABLE data (sid INTEGER PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL);
INSERT INTO "data" VALUES(1,X'7B2264223A5B315D7D',1);
CREATE TABLE end_requests (session_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE ends (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        value BLOB NOT NULL UNIQUE,
        is_beside INTEGER NOT NULL     -- no server wrote it to its log yet
    );
CREATE TABLE events (
        log INTEGER NOT NULL,
        number INTEGER NOT NULL,
        at REAL NOT NULL,
        key BLOB,                      -- the coalescing key
        origin TEXT,
        payload BLOB NOT NULL, name TEXT,
        PRIMARY KEY (log, number)
    ) WITHOUT ROWID;
INSERT INTO "events" VALUES(1,2,1800000000.0,NULL,NULL,X'7B226E223A317D','named-1');
INSERT INTO "events" VALUES(1,3,1800000000.0,X'6B',NULL,X'7B226E223A327D','named-2');
INSERT INTO "events" VALUES(3,1,1800000000.0,NULL,NULL,X'7B22656E747279223A307D',NULL);
INSERT INTO "events" VALUES(3,2,1800000000.0,NULL,NULL,X'7B22656E747279223A317D',NULL);
INSERT INTO "events" VALUES(3,3,1800000000.0,NULL,NULL,X'7B22656E747279223A327D',NULL);
INSERT INTO "events" VALUES(3,4,1800000000.0,NULL,NULL,X'7B22656E747279223A337D',NULL);
INSERT INTO "events" VALUES(4,1,1800000000.0,X'6B','one',X'7B226E223A327D',NULL);
CREATE TABLE keys (
        sid INTEGER NOT NULL,
        key BLOB NOT NULL,
        digest BLOB NOT NULL,
        runner TEXT NOT NULL,
        scopes BLOB NOT NULL,
        at REAL NOT NULL,
        finished INTEGER,              -- in this order; NULL: it runs
        outcome BLOB,                  -- NULL and finished: dropped
        PRIMARY KEY (sid, key)
    ) WITHOUT ROWID;
INSERT INTO "keys" VALUES(1,X'616E737765726564',X'646967657374','run-1@process-1',X'5B2261225D',1800000000.0,1,X'22726573756C74223A7B7D');
INSERT INTO "keys" VALUES(1,X'64726F70706564',X'646967657374','run-1@process-1',X'5B2261225D',1800000000.0,2,NULL);
INSERT INTO "keys" VALUES(1,X'72756E6E696E67',X'646967657374','run-1@process-1',X'5B2261225D',1800000000.0,NULL,NULL);
CREATE TABLE logs (
        log INTEGER PRIMARY KEY,
        sid INTEGER NOT NULL,
        stream TEXT NOT NULL,
        log_epoch TEXT NOT NULL,
        head INTEGER NOT NULL,
        floor INTEGER NOT NULL,
        evicted INTEGER NOT NULL,
        events INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        UNIQUE (sid, stream)
    );
INSERT INTO "logs" VALUES(1,1,'events','1795911578339135686',3,0,0,2,14);
INSERT INTO "logs" VALUES(2,2,'events','1795911578342547339',0,0,0,0,0);
INSERT INTO "logs" VALUES(3,3,'events','1795911578342547340',4,0,0,4,44);
INSERT INTO "logs" VALUES(4,2,'get','1795911578382196295',1,0,0,1,7);
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('count',2);
INSERT INTO "meta" VALUES('file','process-v0-YOHn1zLJ4mF2ZOcJ');
INSERT INTO "meta" VALUES('sessions',3);
CREATE TABLE sessions (
        sid INTEGER PRIMARY KEY,
        session_id TEXT NOT NULL UNIQUE,
        mode TEXT NOT NULL,
        owner BLOB NOT NULL,           -- [client id, issuer, subject]
        scopes BLOB NOT NULL,          -- those it was made with
        credential_expires_at REAL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,      -- up to a hundredth of the idle timeout behind
        ends_at REAL NOT NULL,
        fencing_epoch INTEGER NOT NULL,
        connection_id TEXT,            -- attached with fencing_epoch; NULL: nobody is
        current_id TEXT,
        current_epoch INTEGER,
        stream_opened INTEGER NOT NULL,
        lists BLOB,
        waits_from TEXT,
        state_version INTEGER NOT NULL,
        peer BLOB,
        state BLOB NOT NULL
    , log_level TEXT);
INSERT INTO "sessions" VALUES(1,'one','protocol',X'5B22636C69656E74222C2268747470733A2F2F697373756572222C22616C696365225D',X'5B2261222C2262225D',5.5,1800000000.0,1800001800.0,1800604800.0,0,NULL,NULL,NULL,0,NULL,NULL,1,X'5B22323032352D31312D3235222C7B226361706162696C6974696573223A7B2278223A317D7D2C66616C73655D',X'7B226E223A317D','info');
INSERT INTO "sessions" VALUES(2,'wire','transport',X'5B6E756C6C2C6E756C6C2C6E756C6C5D',X'5B5D',NULL,1800000000.0,1800001800.0,1800604800.0,1,'wire','one',1,1,NULL,NULL,0,X'5B22323032352D31312D3235222C7B226361706162696C6974696573223A7B2278223A317D7D2C66616C73655D',X'7B7D',NULL);
INSERT INTO "sessions" VALUES(3,'agent','agent',X'5B6E756C6C2C6E756C6C2C6E756C6C5D',X'5B5D',NULL,1800000000.0,9e999,9e999,0,NULL,NULL,NULL,0,NULL,NULL,0,X'5B22323032352D31312D3235222C7B226361706162696C6974696573223A7B2278223A317D7D2C66616C73655D',X'7B7D',NULL);
CREATE TABLE subscriptions (
        sid INTEGER NOT NULL, uri BLOB NOT NULL, PRIMARY KEY (sid, uri)
    ) WITHOUT ROWID;
INSERT INTO "subscriptions" VALUES(1,X'6E6F74653A2F2F31');
CREATE INDEX sessions_by_owner ON sessions (owner);
CREATE INDEX sessions_by_deadline ON sessions (expires_at);
CREATE INDEX subscriptions_by_uri ON subscriptions (uri, sid);
CREATE INDEX events_by_key ON events (log, key) WHERE key IS NOT NULL;
CREATE INDEX keys_by_end ON keys (sid, finished) WHERE finished IS NOT NULL;
COMMIT;

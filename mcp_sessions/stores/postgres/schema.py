"""The tables of sessions in Postgres.

What is lost with a crash of the database belongs to processes that live: they write it anew when
they connect again. So these tables are unlogged. Their sequence is not: a standby that becomes the
primary cannot read one of an unlogged table.
"""

from __future__ import annotations

VERSION = 1

TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    sid text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    mode text NOT NULL,
    owner bytea NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    ends_at double precision NOT NULL,
    due_at double precision NOT NULL,
    weight bigint NOT NULL DEFAULT 0,
    facts bytea NOT NULL,
    body bytea NOT NULL,
    state bytea,
    uris bytea,
    tags bigint[],
    data bytea
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS sessions_owner ON sessions (owner, due_at);
CREATE INDEX IF NOT EXISTS sessions_due ON sessions (due_at, sid);
CREATE INDEX IF NOT EXISTS sessions_tags ON sessions USING gin (tags);
CREATE TABLE IF NOT EXISTS events (
    sid text COLLATE "C" NOT NULL REFERENCES sessions ON DELETE CASCADE,
    stream bytea NOT NULL,
    number bigint NOT NULL,
    at double precision NOT NULL,
    size integer NOT NULL,
    tag bigint,
    key bytea,
    origin bytea,
    name bytea,
    payload bytea NOT NULL,
    PRIMARY KEY (sid, stream, number)
);
CREATE INDEX IF NOT EXISTS events_tag ON events (sid, stream, tag) WHERE tag IS NOT NULL;
CREATE TABLE IF NOT EXISTS keys (
    sid text COLLATE "C" NOT NULL REFERENCES sessions ON DELETE CASCADE,
    tag bigint NOT NULL,
    key bytea NOT NULL,
    digest bytea NOT NULL,
    runner text NOT NULL,
    run text NOT NULL,
    scopes bytea NOT NULL,
    at double precision NOT NULL,
    state text NOT NULL,
    outcome bytea NOT NULL,
    finished bigint,
    PRIMARY KEY (sid, tag, key)
);
CREATE INDEX IF NOT EXISTS keys_finished ON keys (sid, finished) WHERE finished IS NOT NULL;
CREATE TABLE IF NOT EXISTS counted (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    sessions bigint NOT NULL DEFAULT 0,
    made bigint NOT NULL DEFAULT 0
);
INSERT INTO counted DEFAULT VALUES ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS ends (
    id bigserial PRIMARY KEY,
    at double precision NOT NULL,
    value bytea NOT NULL UNIQUE,
    is_outside boolean NOT NULL
);
CREATE INDEX IF NOT EXISTS ends_outside ON ends (id) WHERE is_outside;
CREATE TABLE IF NOT EXISTS made (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    name text NOT NULL,
    at double precision NOT NULL
);
CREATE UNLOGGED TABLE IF NOT EXISTS processes (
    process text PRIMARY KEY,
    seen timestamptz NOT NULL
);
CREATE UNLOGGED TABLE IF NOT EXISTS watchers (
    sid text COLLATE "C" NOT NULL,
    stream bytea NOT NULL,
    process text NOT NULL REFERENCES processes ON DELETE CASCADE,
    PRIMARY KEY (sid, stream, process)
);
CREATE INDEX IF NOT EXISTS watchers_process ON watchers (process);
CREATE SEQUENCE IF NOT EXISTS letters;
CREATE UNLOGGED TABLE IF NOT EXISTS mail (
    id bigint PRIMARY KEY DEFAULT nextval('letters'),
    process text NOT NULL REFERENCES processes ON DELETE CASCADE,
    message bytea,
    sid text,
    stream bytea,
    number bigint,
    log_epoch text,
    at double precision,
    key bytea,
    origin bytea,
    payload bytea,
    connection bytea,
    fence bigint
);
CREATE INDEX IF NOT EXISTS mail_process ON mail (process, id);
CREATE TABLE IF NOT EXISTS versions (version integer PRIMARY KEY);
INSERT INTO versions VALUES (1) ON CONFLICT DO NOTHING;
"""

SEALING_KEYS = "CREATE TABLE IF NOT EXISTS sealing_keys (id text PRIMARY KEY);"
"""The ids of the keys that sealed something. Only an encrypted store has this table."""

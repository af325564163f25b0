"""The tables of the store, and how an older store becomes one of today.

One version counts for the whole file. A store of an older version is changed in place, step by step
(`STEPS`), in the transaction that opens it; one of a later version is refused. `database.py` reads
this; what the columns mean is said where they are used.
"""

from __future__ import annotations

VERSION = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    output_file_id TEXT, error_file_id TEXT, errors TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, output_expires_in INTEGER
);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL,
    begin INTEGER NOT NULL, size INTEGER NOT NULL,
    is_answered INTEGER NOT NULL DEFAULT 0, num_faults INTEGER NOT NULL DEFAULT 0,
    status INTEGER, answer BLOB,
    PRIMARY KEY (batch_id, number)
);
CREATE TABLE IF NOT EXISTS kept (
    tenant TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, used_at INTEGER NOT NULL, size INTEGER NOT NULL,
    previous_id TEXT, model TEXT, metadata TEXT NOT NULL, asked BLOB NOT NULL, body BLOB NOT NULL,
    request BLOB,
    PRIMARY KEY (tenant, id)
);
CREATE TABLE IF NOT EXISTS kept_items (
    tenant TEXT NOT NULL, owner TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (tenant, owner, number)
);
CREATE TABLE IF NOT EXISTS kept_sizes (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS kept_came AFTER INSERT ON kept BEGIN
    INSERT INTO kept_sizes VALUES (new.tenant, new.size)
    ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + new.size;
END;
CREATE TRIGGER IF NOT EXISTS kept_grew AFTER UPDATE OF size ON kept BEGIN
    UPDATE kept_sizes SET bytes = bytes + new.size - old.size WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS kept_went AFTER DELETE ON kept BEGIN
    UPDATE kept_sizes SET bytes = bytes - old.size WHERE tenant = old.tenant;
    DELETE FROM kept_items WHERE tenant = old.tenant AND owner = old.id;
END;
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, key BLOB NOT NULL,
    model BLOB NOT NULL, frame BLOB NOT NULL, text TEXT NOT NULL, features BLOB NOT NULL,
    answer TEXT NOT NULL, tokens BLOB NOT NULL, finish TEXT, stop_reason TEXT NOT NULL,
    created_at INTEGER NOT NULL, used_at INTEGER NOT NULL, num_hits INTEGER NOT NULL DEFAULT 0,
    seen TEXT NOT NULL DEFAULT '[]', size INTEGER NOT NULL DEFAULT 0,
    UNIQUE (tenant, key)
);
CREATE TABLE IF NOT EXISTS answer_vectors (
    came INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER NOT NULL UNIQUE,
    embedder BLOB NOT NULL, vector BLOB NOT NULL
);
CREATE TRIGGER IF NOT EXISTS answer_went AFTER DELETE ON answers BEGIN
    DELETE FROM answer_vectors WHERE number = old.number;
END;
CREATE TABLE IF NOT EXISTS spending (
    tenant TEXT PRIMARY KEY, window INTEGER NOT NULL, tokens INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_use ON answers (tenant, used_at, size);
CREATE INDEX IF NOT EXISTS kept_by_age ON kept (tenant, kind, created_at);
CREATE INDEX IF NOT EXISTS kept_by_use ON kept (tenant, used_at);
CREATE INDEX IF NOT EXISTS kept_open ON kept (created_at)
    WHERE status IN ('queued', 'in_progress');
CREATE INDEX IF NOT EXISTS open_lines ON lines (batch_id, number) WHERE is_answered = 0;
CREATE INDEX IF NOT EXISTS files_by_age ON files (tenant, created_at, id);
CREATE INDEX IF NOT EXISTS batches_by_age ON batches (tenant, created_at, id);
"""
# From this version to the next. Tables that are new need no step: `SCHEMA` makes them.
STEPS = {
    1: "ALTER TABLE batches ADD COLUMN output_expires_in INTEGER;",
    # Without sizes. A cache: what is in it is made anew.
    2: "DROP TABLE IF EXISTS answers; DROP TABLE IF EXISTS answer_vectors;",
}

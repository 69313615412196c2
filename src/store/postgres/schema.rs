//! The table: its name, and the SQL that makes it.

use std::fmt::Write;

use crate::claim::Scope;

/// A table's name, checked and quoted once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    /// Checks the names. Without a schema the connection's `search_path` decides.
    pub(super) fn new(schema: Option<&str>, name: &str) -> Result<Self, String> {
        if let Some(schema) = schema {
            check("schema", schema, MAX_IDENTIFIER)?;
        }
        check("table", name, MAX_IDENTIFIER - COMPANION.len())?;
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    /// `processed_events`, as the article has it.
    pub(super) fn with_default_name() -> Self {
        Self { schema: None, name: DEFAULT_NAME.to_owned() }
    }

    /// The name as it stands in SQL.
    pub(super) fn quoted(&self) -> String {
        self.with_suffix("")
    }

    /// The table that records the version.
    fn companion(&self) -> String {
        self.with_suffix(COMPANION)
    }

    fn with_suffix(&self, suffix: &str) -> String {
        let name = identifier(&format!("{}{suffix}", self.name));
        match &self.schema {
            Some(schema) => format!("{}.{name}", identifier(schema)),
            None => name,
        }
    }
}

/// The migration: one statement, so that it is carried out whole or not at all, and safe to repeat.
///
/// A migration is never edited after its release; a later one is a further `IF installed < n` at the
/// end.
pub(super) fn migration(table: &Table, adopt_scope: Option<&Scope>) -> String {
    let (name, companion) = (table.quoted(), table.companion());
    let (name_text, companion_text) = (literal(&name), literal(&companion));
    let scope = literal(adopt_scope.map_or(ADOPTED, Scope::as_str));
    let mut sql = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        sql,
        "\
DO {TAG}
DECLARE
    installed int;
    found text;
    stray record;
BEGIN
    IF current_setting('server_encoding') NOT IN ('UTF8', 'SQL_ASCII') THEN
        RAISE EXCEPTION 'the database is encoded in %, which cannot store every event key',
            current_setting('server_encoding')
            USING HINT = 'Use a database whose encoding is UTF8.';
    END IF;
    -- One at a time, however many start together.
    PERFORM pg_advisory_xact_lock(hashtextextended('tower-dedupe migration of ' || {name_text}, 0));
"
    );
    if let Some(schema) = &table.schema {
        let _ = write!(
            sql,
            "
    IF to_regnamespace({schema_text}) IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
",
            schema_text = literal(&identifier(schema)),
            schema = identifier(schema),
        );
    }
    let _ = write!(
        sql,
        "
    IF to_regclass({companion_text}) IS NULL THEN
        CREATE TABLE {companion} (
            version    int4 PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT now()
        );
    END IF;
    SELECT coalesce(max(version), 0) INTO installed FROM {companion};
    IF installed > {LATEST} THEN
        RAISE EXCEPTION 'table % is of version %, this program knows versions up to {LATEST}',
            {name_text}, installed
            USING HINT = 'Upgrade tower-dedupe in this program.';
    END IF;

    IF to_regclass({name_text}) IS NULL THEN
        -- Somebody has dropped it, to begin again.
        DELETE FROM {companion};
        installed := 0;
    END IF;

    IF installed < 1 THEN
        IF to_regclass({name_text}) IS NULL THEN
            CREATE TABLE {name} (
                scope           text COLLATE \"C\" NOT NULL,
                event_key       text COLLATE \"C\" NOT NULL,
                status          text NOT NULL,
                token           bytea,
                attempt         int4 NOT NULL,
                claimed_at      timestamptz NOT NULL,
                lease_until     timestamptz NOT NULL,
                done_at         timestamptz,
                expires_at      timestamptz NOT NULL,
                response_status int2,
                PRIMARY KEY (scope, event_key)
            );
        ELSE
{adoption}
        END IF;
        ALTER TABLE {name}
            ADD CHECK (status IN ('in_progress', 'done', 'failed')),
            SET (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02);
        INSERT INTO {companion} (version) VALUES (1);
    END IF;

    IF installed < 2 THEN
        -- Rows that have neither are as long as before; one in which nothing was null is longer by
        -- the eight bytes that say so.
        ALTER TABLE {name}
            ADD COLUMN fingerprint bytea,
            ADD COLUMN response bytea;
        INSERT INTO {companion} (version) VALUES (2);
    END IF;
END
{TAG};
",
        adoption = adoption(&name, &name_text, &scope),
    );
    sql
}

/// Turns a table of the copied pattern, `(event_key, status, claimed_at)`, into ours, with every
/// row it has.
fn adoption(name: &str, name_text: &str, scope: &str) -> String {
    format!(
        "\
            -- A table is there that tower-dedupe did not make: the copied pattern's, it is hoped.
            LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE;
            SELECT string_agg(wanted, ', ') INTO found
            FROM unnest(ARRAY['event_key', 'status', 'claimed_at']) AS wanted
            WHERE NOT EXISTS (
                SELECT FROM pg_attribute
                WHERE attrelid = to_regclass({name_text}) AND attname = wanted
                  AND attnum > 0 AND NOT attisdropped);
            IF found IS NOT NULL THEN
                RAISE EXCEPTION 'table % exists and has no column %', {name_text}, found
                    USING HINT = 'Configure another table name for tower-dedupe.';
            END IF;
            SELECT string_agg(attname, ', ') INTO found
            FROM pg_attribute
            WHERE attrelid = to_regclass({name_text}) AND attnum > 0 AND NOT attisdropped
              AND (attname IN ('scope', 'token', 'attempt', 'lease_until', 'done_at', 'expires_at',
                               'response_status', 'fingerprint', 'response')
                   OR attname NOT IN ('event_key', 'status', 'claimed_at')
                      AND attnotnull AND NOT atthasdef AND attidentity = '');
            IF found IS NOT NULL THEN
                RAISE EXCEPTION 'table % exists and cannot be adopted with its columns %',
                    {name_text}, found
                    USING HINT = 'Columns of these names, or required ones without a default, '
                                 'stand in the way. Drop them, or configure another table name.';
            END IF;

            SELECT format_type(atttypid, NULL) INTO found
            FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
            WHERE attrelid = to_regclass({name_text}) AND attname = 'event_key'
              AND typcategory NOT IN ('S', 'N') AND typname <> 'uuid';
            IF found IS NOT NULL THEN
                RAISE EXCEPTION 'table % exists and its event_key is of type %', {name_text}, found
                    USING HINT = 'Make it text, then migrate again.';
            END IF;

            SELECT string_agg(DISTINCT coalesce(quote_literal(status::text), 'null'), ', ')
                INTO found
            FROM {name}
            WHERE status IS NULL OR lower(status::text) NOT IN ({done}, {in_progress}, {failed});
            IF found IS NOT NULL THEN
                RAISE EXCEPTION 'table % has rows of status %, which tower-dedupe does not know',
                    {name_text}, found
                    USING HINT = 'Set them to done, in_progress or failed, then migrate again.';
            END IF;
            IF EXISTS (SELECT FROM {name} WHERE event_key IS NULL) THEN
                RAISE EXCEPTION 'table % has rows whose event_key is null', {name_text}
                    USING HINT = 'Delete them, then migrate again.';
            END IF;

            -- What makes the key unique now would make it unique across all scopes.
            FOR stray IN
                SELECT conrelid::regclass AS on_table, conname FROM pg_constraint
                WHERE conrelid = to_regclass({name_text})
                  AND (contype IN ('p', 'u', 'x')
                       OR contype = 'c' AND conkey @> ARRAY(
                           SELECT attnum FROM pg_attribute
                           WHERE attrelid = conrelid AND attname = 'status'))
            LOOP
                EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', stray.on_table, stray.conname);
            END LOOP;
            FOR stray IN
                SELECT indexrelid::regclass AS index FROM pg_index
                WHERE indrelid = to_regclass({name_text}) AND indisunique
            LOOP
                EXECUTE format('DROP INDEX %s', stray.index);
            END LOOP;

            ALTER TABLE {name}
                ALTER COLUMN event_key DROP DEFAULT,
                ALTER COLUMN status DROP DEFAULT,
                ALTER COLUMN claimed_at DROP DEFAULT;
            ALTER TABLE {name}
                ALTER COLUMN event_key TYPE text COLLATE \"C\",
                ALTER COLUMN event_key SET NOT NULL,
                ALTER COLUMN status TYPE text USING CASE
                    WHEN lower(status::text) IN ({done}) THEN 'done'
                    WHEN lower(status::text) IN ({failed}) THEN 'failed'
                    ELSE 'in_progress' END,
                ALTER COLUMN status SET NOT NULL,
                ALTER COLUMN claimed_at TYPE timestamptz USING coalesce(claimed_at, now()),
                ALTER COLUMN claimed_at SET NOT NULL,
                ADD COLUMN scope text COLLATE \"C\" NOT NULL DEFAULT {scope},
                ADD COLUMN token bytea,
                ADD COLUMN attempt int4 NOT NULL DEFAULT 1,
                -- Old handlers may be at work: their claims are over a quarter of an hour after
                -- they were made.
                ADD COLUMN lease_until timestamptz,
                ADD COLUMN done_at timestamptz,
                ADD COLUMN expires_at timestamptz,
                ADD COLUMN response_status int2;
            UPDATE {name} SET
                lease_until = claimed_at + interval '15 minutes',
                done_at = CASE status WHEN 'done' THEN claimed_at END,
                expires_at = greatest(now(), claimed_at + interval '15 minutes')
                    + CASE status WHEN 'done' THEN interval '30 days' ELSE interval '1 day' END;
            ALTER TABLE {name}
                ALTER COLUMN scope DROP DEFAULT,
                ALTER COLUMN attempt DROP DEFAULT,
                ALTER COLUMN lease_until SET NOT NULL,
                ALTER COLUMN expires_at SET NOT NULL,
                ADD PRIMARY KEY (scope, event_key);",
        done = "'done', 'complete', 'completed', 'processed', 'success', 'succeeded'",
        in_progress = "'in_progress', 'claimed', 'pending', 'processing'",
        failed = "'failed', 'error'",
    )
}

/// Whether the migration would adopt a table.
pub(super) fn would_adopt(table: &Table) -> String {
    format!(
        "SELECT to_regclass({}) IS NOT NULL AND to_regclass({}) IS NULL",
        literal(&table.quoted()),
        literal(&table.companion()),
    )
}

fn check(what: &str, name: &str, limit: usize) -> Result<(), String> {
    crate::claim::check_text(name, limit).map_err(|error| format!("the {what} name {error}"))?;
    if name.contains(TAG) {
        return Err(format!("the {what} name contains {TAG}"));
    }
    Ok(())
}

fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Text as it stands in SQL, whatever `standard_conforming_strings` is.
pub(super) fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    match quoted.contains('\\') {
        true => format!("E'{}'", quoted.replace('\\', "\\\\")),
        false => format!("'{quoted}'"),
    }
}

/// The scope of adopted rows, unless another is configured.
pub(super) const ADOPTED: &str = "adopted";

pub(super) const DEFAULT_NAME: &str = "processed_events";
const LATEST: u32 = 2;
const COMPANION: &str = "_migrations";
/// Postgres cuts longer names, and two that are cut may become one.
const MAX_IDENTIFIER: usize = 63;
const TAG: &str = "$tower_dedupe$";

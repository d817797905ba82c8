-- DuckDB 2.0.1 made duckdb.parquet of this, which tests read without DuckDB.
CREATE TYPE city AS ENUM ('Oslo', 'Rome', 'Bern');
COPY (
    SELECT
        i AS id,
        (i % 50)::HUGEINT AS huge,
        (i % 128)::UBIGINT AS large,
        (i % 100 / 4)::DECIMAL(9, 2) AS price,
        DATE '2020-01-01' + (i // 100)::INTEGER AS day,
        (TIMESTAMP '2020-01-01' + INTERVAL (i // 100) DAY)::TIMESTAMP_S AS at_s,
        (CASE i % 3 WHEN 0 THEN 'Oslo' WHEN 1 THEN 'Rome' ELSE 'Bern' END)::city AS city,
        i % 2 = 0 AS flag,
        CASE WHEN i % 5 = 0 THEN NULL ELSE i % 7 END::TINYINT AS gaps
    FROM range(5000) AS rows(i)
) TO 'tests/data/duckdb.parquet'
(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2, ROW_GROUP_SIZE 2048);

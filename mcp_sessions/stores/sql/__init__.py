"""Sessions in the rows of a database: the rules of ``core/`` decide, rows are read and written."""

"""Where the columns of rows in flight lie."""

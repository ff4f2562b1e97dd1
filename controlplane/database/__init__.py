"""PostgreSQL: connections with a response timeout, retries of conflicts, consistent reads, and two database roles."""

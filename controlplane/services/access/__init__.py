"""Services for users, their sessions, roles, sign-ins and API tokens."""

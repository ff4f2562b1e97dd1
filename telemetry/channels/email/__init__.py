"""E-mail, by SMTP: README.md."""

"""What crosses a process without knowing what it carries: a mailbox, and a server of metrics text."""

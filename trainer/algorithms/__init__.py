"""Policy-gradient algorithms, one a module; `registry` builds them from the config union. They know no model and no
rank."""

"""The verbs of the console command `stmoe`, one file each; all of them need only the wheel."""

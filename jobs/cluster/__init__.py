"""N workers run one function, on Ray or as plain processes: started, watched, restarted, submitted."""

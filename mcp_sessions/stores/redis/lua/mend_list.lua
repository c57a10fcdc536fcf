-- KEYS: a list. ARGV: its type. Whether it was another one, and is gone.
local there = redis.call('TYPE', KEYS[1]).ok
if there == 'none' or there == ARGV[1] then
    return 0
end
redis.call('UNLINK', KEYS[1])
return 1

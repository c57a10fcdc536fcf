-- needs: session
-- ARGV: fencing epoch
-- The late end of a displaced connection changes nothing (TKO9).
local fields = redis.call('HMGET', base, 'conn', 'fence')
if not fields[1] or fields[2] ~= ARGV[1] then
    return 0
end
redis.call('HDEL', base, 'conn')
return 1

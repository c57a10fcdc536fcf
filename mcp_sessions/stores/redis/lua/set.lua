-- needs: session
-- ARGV: field, value, whether there is one. Whether it was another value before.
if redis.call('EXISTS', base) == 0 then
    return 0
end
if ARGV[3] ~= '1' then
    return redis.call('HDEL', base, ARGV[1])
end
local before = redis.call('HGET', base, ARGV[1])
redis.call('HSET', base, ARGV[1], ARGV[2])
return before ~= ARGV[2] and 1 or 0

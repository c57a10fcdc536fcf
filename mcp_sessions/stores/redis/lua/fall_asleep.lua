-- needs: session log
-- ARGV: new log epoch, latest deadline of one that sleeps
-- The deadline, if it is a later one; false: nothing is left to be done.
local times = redis.call('HMGET', base, 'expires', 'ends', 'mode')
if not times[1] then
    return false
end
local expires, ends, mode = times[1], times[2], times[3]
if not has_come(expires, ARGV[2]) then
    return expires
end
if has_come(ends, expires) or mode ~= 'transport' and mode ~= 'protocol' then
    return false
end
for _, field in ipairs(redis.call('HKEYS', base)) do
    local stream = string.sub(field, 3)
    if string.sub(field, 1, 2) == 'l:' and stream ~= 'events' and stream ~= 'get' then
        redis.call('HDEL', base, field)
        redis.call('UNLINK', base .. ':e:' .. stream, base .. ':k:' .. stream)
    end
end
redis.call('UNLINK', base .. ':r')
redis.call('HSET', base, 'slept', '1')
for _, stream in ipairs({ 'events', 'get' }) do
    local log = open_log(stream, ARGV[1], seconds(ends))
    if log and log.count > 0 then
        redis.call('UNLINK', log.events, log.by_key)
        log.floor, log.evicted = log.head, log.head
        log.count, log.bytes, log.first = 0, 0, 0
        save(log)
    end
end
return false
